"""What a Python rank runs: the user's script as ``python script.py`` would, and a clean end after it.

Note: why the script is not simply given to Python
    A Gloo process group that is still there when the interpreter shuts down can abort the process
    ("terminate called without an active exception", PyTorch issue 190489): on a busy machine every
    tenth run that went well would end as a failure. Hardly any script calls
    ``destroy_process_group``, so it is done here, after a script that ended well and before the
    shutdown. After an exception it is not: collectives that wait for other ranks would be waited for.

The script must not notice: ``sys.argv``, ``sys.path`` and ``__main__`` are as Python sets them, and
tracebacks begin with the script's own frames. Runs as a script itself, or in a process that
``fork_server.py`` forked; standard library only.
"""

from __future__ import annotations

import atexit
import importlib
import io
import os
import runpy
import sys
import types
from importlib.machinery import SourceFileLoader


def run(kind: str, name: str, *arguments: str, hide: tuple[str, ...] = ()) -> None:
    """Run a script or a module as the main program, and end the process group it may have left.

    Args:
        kind: "script" or "module".
        name: path of the script, or name of the module.
        arguments: the rest of its command line.
        hide: more files whose frames stay out of tracebacks.
    """
    end = atexit.register(_end_process_group, os.getpid())  # registered first, so called last
    try:
        _run_as_main(kind, name, list(arguments))
    except SystemExit as ended:
        if ended.code not in (None, 0):
            atexit.unregister(end)
        raise
    except BaseException as error:
        atexit.unregister(end)
        _show(error, hide)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _observe() -> None:
    """Have it recorded where the script stands. Leaves no module, as the script may have its own paceline."""
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.insert(0, source)
    try:
        importlib.import_module("paceline.recorder.ring").observe()
    finally:
        sys.path.remove(source)
        for name in [name for name in sys.modules if name.partition(".")[0] == "paceline"]:
            del sys.modules[name]


def _run_as_main(kind: str, name: str, arguments: list[str]) -> None:
    """Run a script or a module in a ``__main__`` of its own."""
    sys.argv = [name, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(name))
    if kind == "module":
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` calls as well
        return
    path = os.path.join(os.getcwd(), name)  # not normalised, as Python does not
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    main.__dict__["__builtins__"] = __builtins__
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _show(error: BaseException, hide: tuple[str, ...]) -> None:
    """Print an uncaught exception as Python does, without the frames of this file and of runpy."""
    ours = (__file__, runpy.run_path.__code__.co_filename, *hide)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
    sys.excepthook(type(error), error, trace)


def _end_process_group(pid: int) -> None:
    """Destroy a default Gloo group that the script left behind (see the note above)."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or os.getpid() != pid:  # a child that the rank forked has no business with it
        return
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


if __name__ == "__main__":
    _observe()
    run(*sys.argv[1:])
