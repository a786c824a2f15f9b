"""`python`, for tests, in a process forked from one that has imported torch: the import alone takes seconds of CPU.

    subprocess.run([*warm_python.command(), "script.py", "1"], ...)   # or -c CODE, or -m MODULE

What is started is a small client, which `subprocess` treats as any other program. It hands its arguments, environment,
folder and standard streams to a server, which forks; passes signals on; and ends as the forked process ends. To kill
that one, send `KILL`: if the client is killed, it follows a little later. Where the order of imports matters, start
`sys.executable`.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path

LARGEST_REQUEST_BYTES = 150_000
ADDRESS = "GRADWATCH_TESTS_WARM_PYTHON"
"""Names the socket of the server that all test processes share; without it, each starts its own."""
KILL = signal.SIGQUIT  # passed on as SIGKILL, which no client could catch
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, KILL)


@functools.cache
def command():
    """Return what to write in place of `[sys.executable]`."""
    if not hasattr(os, "pidfd_open"):
        return [sys.executable]
    return [sys.executable, "-SE", __file__, os.environ.get(ADDRESS) or start()]


def share():
    """Start a server for this process and all that it starts from now on."""
    if hasattr(os, "pidfd_open"):
        os.environ[ADDRESS] = start()


def start():
    """Start a server that ends with this process, and imports when its first client comes; return its address."""
    address = tempfile.mktemp(prefix="warm-python-")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    life, held = os.pipe()  # the write end is open as long as this process lives
    os.set_inheritable(held, False)
    subprocess.Popen(
        [sys.executable, __file__, "--serve", str(listener.fileno()), str(life), address],
        pass_fds=(listener.fileno(), life),
        stdin=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        process_group=0,
    )
    listener.close()
    os.close(life)
    return address


def write_program(folder):
    """Write the command into a file that can be started, for torchrun's PYTHON_EXEC; return its path."""
    path = folder / "warm-python"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    path.chmod(0o755)
    return path


def ask(address, arguments):
    """Have the arguments run by the server, as a client; return the exit code, or end by the same signal."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(address)
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd())}
    socket.send_fds(channel, [json.dumps(request).encode()], [0, 1, 2])
    for number in FORWARDED:
        signal.signal(number, lambda number, _: channel.send(str(int(number)).encode()))
    os.closerange(0, 3)  # the reader of a pipe sees its end when the forked process ends
    code = int(channel.recv(16))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(listener, life, address):
    """Fork for each client; return, in the forked process alone, what is to be run."""
    has_imported = False
    while True:
        ready, _, _ = select.select([listener, life], [], [])
        if life in ready:
            Path(address).unlink()
            os._exit(0)
        if not has_imported:
            import_much()
            has_imported = True
        channel, _ = listener.accept()
        if os.fork():
            channel.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            continue
        listener.close()
        os.close(life)
        text, streams, *_ = socket.recv_fds(channel, LARGEST_REQUEST_BYTES, 3)
        child = os.fork()
        if child:
            supervise(channel, child, streams)
        channel.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return json.loads(text)


def import_much():
    """Import what most trainings of the tests do, read the sources that most configs name, and start no thread."""
    import torch

    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # it imports torch._dynamo
    import torch.distributed.fsdp

    import gradwatch.cli.train
    import gradwatch.train.loop
    from gradwatch.config.load import load_config
    from gradwatch.detect import detectors

    assert gradwatch.train
    detectors({})
    load_config(Path(__file__).parents[1] / "configs" / "quickstart.yaml")
    gc.collect()
    gc.freeze()


def supervise(channel, child, streams):
    """Pass signals on to a process, tell its client how it ended, and kill it if the client is gone."""
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([channel, ended], [], [])
        if ended in ready:
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(OSError):
                channel.send(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        number = int(channel.recv(16) or KILL)
        os.kill(child, signal.SIGKILL if number == KILL else number)


def become(request):
    """Make this process what the interpreter would have been, and return what is to be called as its program."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
    kind, *rest = request["arguments"]
    if kind == "-u":  # whoever waits for the end of the process misses nothing
        kind, *rest = rest
    if kind == "-W":
        warnings.simplefilter(rest[0])
        kind, *rest = rest[1:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        sys.argv, sys.path[0] = rest, str(Path.cwd())
        return functools.partial(runpy.run_module, rest[0], run_name="__main__", alter_sys=True)
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        code = compile(rest[0], "<string>", "exec")
    else:
        file = Path.cwd() / kind
        sys.argv, sys.path[0], main.__file__ = [kind, *rest], str(file.parent), str(file)
        code = compile(file.read_bytes(), str(file), "exec")
    return functools.partial(exec, code, main.__dict__)


def run(program):
    """Run a program and end as the interpreter would, but for the seconds in which it takes its modules apart."""
    code = 0
    try:
        program()
    except SystemExit as error:
        code = error.code
    except BaseException:
        code = -signal.SIGINT if isinstance(sys.exception(), KeyboardInterrupt) else 1
        sys.last_type, error, trace = sys.exc_info()
        sys.last_traceback = trace.tb_next  # without this function
        sys.last_value = error.with_traceback(sys.last_traceback)
        sys.excepthook(sys.last_type, sys.last_value, sys.last_traceback)
    threading._shutdown()
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        ask(sys.argv[1], sys.argv[2:])
    run(become(serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), sys.argv[4])))
