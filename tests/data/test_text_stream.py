"""Text files as a stream: the windows, the shards, the place to resume at, and files that cannot be read."""

import itertools
import json

import pytest
import torch

from gradwatch.data import check, text_stream
from gradwatch.errors import GradwatchError
from gradwatch.train.streams.batches import StreamBatches

END = text_stream.END_OF_TEXT


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("first line\n\nsecond: é\n", encoding="utf-8")
    texts = ["a text\nof two lines", "x" * 50, "end"]
    (folder / "b.jsonl").write_text("".join(json.dumps({"id": 1, "text": t}) + "\n" for t in texts))
    (folder / "c.md").write_text("not read")
    return folder


def tokens_of(dataset):
    """Return the tokens that the windows cover."""
    windows = list(dataset)
    for (_, targets), (inputs, _) in itertools.pairwise(windows):
        assert targets[-1] == inputs[0], "windows touch"
    return [int(windows[0][0][0]), *(t for _, targets in windows for t in targets.tolist())]


def tokens(*texts):
    return [t for text in texts for t in [*text.encode(), END]]


TEXTS = ("first line", "second: é", "a text\nof two lines", "x" * 50, "end")


def test_windows_run_through_all_texts_of_all_files(corpus):
    splits = check(text_stream.build(files=str(corpus), context=8), "text_stream")

    assert (splits.spec.input_shape, splits.spec.outputs, splits.spec.kind) == ((8,), 257, "tokens")
    assert tokens_of(splits.train) == tokens(*TEXTS), "97 tokens are 12 windows and the last target"
    inputs, targets = next(iter(splits.train))
    assert torch.equal(inputs[1:], targets[:-1])


def test_shards_have_every_other_line_of_all_files(corpus):
    whole = text_stream.build(files=str(corpus), context=5).train

    parts = [tokens_of(whole.shard(num_shards=2, index=index)) for index in range(2)]

    for part, texts in zip(parts, (TEXTS[:2] + TEXTS[3:4], TEXTS[2:3] + TEXTS[4:]), strict=True):
        assert part == tokens(*texts)[: len(part)]
        assert len(tokens(*texts)) - len(part) < 5


def test_a_stream_goes_on_at_every_window_that_it_was_left_at(corpus):
    expected = list(text_stream.build(files=str(corpus), context=7).train)
    left = text_stream.build(files=str(corpus), context=7).train

    for number, _ in enumerate(left, 1):
        resumed = text_stream.build(files=str(corpus), context=7).train
        resumed.load_state_dict(json.loads(json.dumps(left.state_dict())))
        rest = list(resumed)
        assert len(rest) == len(expected) - number
        assert all(torch.equal(a[1], b[1]) for a, b in zip(rest, expected[number:], strict=True))
    assert len(expected) == 13


def test_a_window_inside_of_a_long_text_keeps_a_small_state(tmp_path):
    (tmp_path / "long.txt").write_text("y" * 10_000)
    reader = StreamBatches(text_stream.build(files=str(tmp_path / "*.txt"), context=4).train, batch_size=2)
    next(itertools.islice(reader.epoch(0), 100, None))

    state = reader.state_dict()["shards"]["0"]["state"]

    assert state == {"file": 0, "byte": 0, "text": 0, "rest": [], "used": 101 * 2 * 4}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"files": "gone"}, r"data.files: no file .*gone, expected a text file, a folder"),
        ({"files": []}, "data.files: got an empty list"),
        ({"files": "bad.jsonl"}, "bad.jsonl, the line at byte 14: is not JSON"),
        ({"files": "keys.jsonl"}, "keys.jsonl, the line at byte 0: has no text with the key 'text', its keys are body"),
        ({"files": "latin.txt"}, "latin.txt, the line at byte 0: is not UTF-8 text"),
        ({"files": "bad.jsonl", "val_files": "gone"}, "data.val_files: no file"),
        ({"files": "bad.jsonl", "context": 0}, "data.context: got 0"),
        ({"files": "empty.txt"}, "training part: is empty, expected a stream that yields at least one sample"),
    ],
)
def test_what_cannot_be_read_is_refused_by_file_and_place(tmp_path, monkeypatch, options, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "keys.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")

    with pytest.raises(GradwatchError, match=reason):
        check(text_stream.build(**{"context": 3} | options), "text_stream")
