"""Keeps torch.compile out of a class.

Where a compiled function's graph breaks, the compiler looks at every Python function that is called
from there. It treats process groups as opaque, so that a method of one written in Python is an error
to it instead of one more break.
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type[Any])


def uncompiled(cls: _Class) -> _Class:
    """A class decorator: the compiler leaves its methods, and what they call, to the interpreter.

    Does what ``torch.compiler.disable`` does, without loading the compiler, which takes seconds.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    for member in vars(cls).values():
        if isinstance(member, types.FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return cls
