"""Keeps torch.compile out of functions and classes.

Where a compiled function's graph breaks, the compiler looks at every Python function that is called
from there, hooks of autograd among them. It treats process groups as opaque, so that a method of one
written in Python is an error to it instead of one more break; and what it makes of code that counts
passes and plans buckets is compiled anew in every pass.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

_Target = TypeVar("_Target", bound=Callable[..., Any])


def interpreted(target: _Target) -> _Target:
    """Decorates a function, or a class for all its methods: they, and what they call, are interpreted.

    Does what ``torch.compiler.disable`` does, without loading the compiler, which takes seconds.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    for function in vars(target).values() if isinstance(target, type) else [target]:
        if isinstance(function, types.FunctionType):
            function.__dict__["_torchdynamo_disable"] = True  # a graph of its caller ends before it
            eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return target
