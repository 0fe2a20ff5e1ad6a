"""Which non-tensor arguments of two ops differ, in words."""

from __future__ import annotations

from collections.abc import Mapping

from opdrift.records import Argument, ArgumentDifference, TensorArgument


def argument_differences(
    left: Mapping[str, Argument], right: Mapping[str, Argument]
) -> tuple[ArgumentDifference, ...]:
    """Arguments by name that differ; two tensors do not, a tensor and none do."""
    found = []
    for name in dict.fromkeys([*left, *right]):
        a, b = left.get(name), right.get(name)
        if _both_tensors(a, b) or (a == b and type(a) is type(b)):
            continue
        if _is_tensor(a) and name not in right and b is None:
            found.append(ArgumentDifference(name, describe(a), None))
        elif _is_tensor(b) and name not in left and a is None:
            found.append(ArgumentDifference(name, None, describe(b)))
        elif a != b or type(a) is not type(b):
            found.append(ArgumentDifference(name, describe(a), describe(b)))
    return tuple(found)


def describe(argument: Argument) -> str:
    """An argument as a person would write it."""
    if isinstance(argument, TensorArgument):
        return str(argument.meta)
    if isinstance(argument, tuple):
        return f"[{', '.join(describe(a) for a in argument)}]"
    return str(argument)


def _is_tensor(argument: Argument) -> bool:
    if isinstance(argument, TensorArgument):
        return True
    return isinstance(argument, tuple) and any(_is_tensor(a) for a in argument)


def _both_tensors(left: Argument, right: Argument) -> bool:
    if isinstance(left, TensorArgument) and isinstance(right, TensorArgument):
        return True
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        return bool(left) and all(_both_tensors(a, b) for a, b in zip(left, right, strict=True))
    return False
