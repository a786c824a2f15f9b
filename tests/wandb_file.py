"""Read the file of an offline run of W&B: records in the log format of LevelDB."""

import struct

from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK = 7, 32 * 1024  # bytes
LAST = (1, 4)  # types of a part that ends a record


def read_records(path):
    """Return the records of a run by type, in their order."""
    data, place, part, found = path.read_bytes(), HEADER, b"", {}
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:  # a header never crosses the end of a block
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if place + HEADER + length > len(data):  # W&B is still writing the part
            break
        part += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in LAST:
            record = Record.FromString(part)
            name = record.WhichOneof("record_type")
            found.setdefault(name, []).append(getattr(record, name))
            part = b""
    return found


def values(items):
    """Return the names of a row or summary with their values as JSON."""
    return {item.key or "/".join(item.nested_key): item.value_json for item in items}
