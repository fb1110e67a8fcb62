"""What a Python rank runs: the user's script as ``python script.py`` would, and a clean end after it.

Note: why the script is not simply given to Python
    A Gloo process group that is still there when the interpreter shuts down can abort the process
    ("terminate called without an active exception", PyTorch issue 190489): on a busy machine every
    tenth run that went well would end as a failure. Hardly any script calls
    ``destroy_process_group``, so it is done here, after a script that ended well and before the
    shutdown. After an exception it is not: collectives that wait for other ranks would be waited for.

Note: the end of the script is told at once
    An interpreter takes a second and more to shut down, and its connections stay open meanwhile. So
    the end of the script is told to the launcher in a file, and of an exception what Python printed
    (the script may have turned its stderr elsewhere).

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
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any

ScriptIsOver = Callable[[types.TracebackType | None], None]


def run(
    told: str,
    kind: str,
    name: str,
    *arguments: str,
    hide: tuple[str, ...] = (),
    script_is_over: ScriptIsOver = lambda trace: None,
) -> None:
    """Run a script or a module as the main program, and end the process group it may have left.

    Args:
        told: path of the file that is to tell how the script ended.
        kind: "script" or "module".
        name: path of the script, or name of the module.
        arguments: the rest of its command line.
        hide: more files whose frames stay out of tracebacks.
        script_is_over: called then, with the traceback of the exception that ended it, if it ended badly.
    """
    pid = os.getpid()
    end = atexit.register(_end_process_group, pid)  # registered first, so called last
    status, error, trace = 0, None, None
    try:
        _run_as_main(kind, name, list(arguments))
    except SystemExit as ended:
        status = _status(ended)
        trace = _of_the_script(ended.__traceback__, hide) if status else None
        raise
    except BaseException as raised:
        status, error = 130 if isinstance(raised, KeyboardInterrupt) else 1, raised
        trace = _of_the_script(raised.__traceback__, hide)
        sys.last_type, sys.last_value, sys.last_traceback = type(raised), raised.with_traceback(trace), trace
        sys.excepthook(type(raised), raised, trace)
        sys.exit(status)
    finally:
        if status:
            atexit.unregister(end)
        if os.getpid() == pid:  # and not a child that the rank forked
            script_is_over(trace)
            _tell(told, status, error)


def _observe() -> ScriptIsOver:
    """Have it recorded where the script stands. Leaves no module, as the script may have its own paceline.

    Returns:
        What is to be called when the script is over.
    """
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.insert(0, source)
    try:
        over: ScriptIsOver = importlib.import_module("paceline.recorder.ring").observe()
        return over
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


def _of_the_script(trace: types.TracebackType | None, hide: tuple[str, ...]) -> types.TracebackType | None:
    """A traceback without the frames of this file and of runpy."""
    ours = (__file__, runpy.run_path.__code__.co_filename, *hide)
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _status(ended: SystemExit) -> int:
    """The exit status that Python makes of it."""
    if ended.code is None or isinstance(ended.code, int):
        return (ended.code or 0) & 0xFF
    return 1


def _tell(told: str, status: int, error: BaseException | None) -> None:
    """Say how the script ended; the file appears whole, for the launcher looks at it at any time.

    An exception is written as torch elastic's ``@record`` writes it.
    """
    import json  # here: the script is not to find them imported
    import traceback

    words: dict[str, Any] = {"status": status}
    if error is not None:
        text = "".join(traceback.format_exception(error))
        words["message"] = {"message": str(error), "extraInfo": {"py_callstack": text}}
    try:
        with open(f"{told}.new", "w") as file:
            json.dump(words, file)
        os.rename(file.name, told)
    except OSError:
        pass  # the end of the process will tell


def _end_process_group(pid: int) -> None:
    """Destroy a default Gloo group that the script left behind (see the note above)."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or os.getpid() != pid:  # a child that the rank forked has no business with it
        return
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


if __name__ == "__main__":
    run(*sys.argv[1:], script_is_over=_observe())
