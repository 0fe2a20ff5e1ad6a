"""Where in the model an op runs."""

from __future__ import annotations

import threading

import pytest
import torch
from recordings import recording
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint

from opdrift.scopes import clean, cleaner, name_arguments, unwrapped


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.second(self.first(x))


X = torch.ones(1, 2)


def path_of(found, name: str) -> str:
    return found.op(name).call.path


# ---- paths -------------------------------------------------------------------------------------------


def test_an_op_runs_in_the_innermost_module():
    model = Model()
    with recording(model=model) as found:
        model(X)

    assert path_of(found, "addmm.default") == "second.inner"
    assert path_of(found, "relu.default") == "second"


def test_the_calls_of_a_path_are_numbered():
    model = nn.Linear(2, 2)
    with recording(model=model) as found:
        model(X)
        model(X)

    assert found.paths == [("", 0), ("", 1)]


def test_a_call_knows_the_call_that_made_it():
    model = Model()
    with recording(model=model) as found:
        model(X)

    parents = {call.path: found.trace.calls[call.parent].path for call in found.trace.calls[1:]}
    assert parents["second.inner"] == "second"


def test_a_root_that_nobody_announced_is_the_empty_path():
    model = Model()
    with recording() as found:
        model(X)

    assert path_of(found, "relu.default") == "second"


def test_further_roots_are_named_by_their_type():
    with recording() as found:
        Model()(X)
        nn.Linear(2, 2)(X)
        nn.Linear(2, 2)(X)

    assert [path for path, _ in found.paths][-2:] == ["Linear", "Linear#1"]


def test_a_part_of_a_model_that_is_called_alone_keeps_its_path():
    model = Model()
    with recording(model=model) as found:
        model.second(X)

    assert path_of(found, "relu.default") == "second"


def test_models_of_a_mapping_are_named_by_it():
    models = {"student": Block(), "teacher": Block()}
    with recording(model=models) as found:
        models["student"](X)
        models["teacher"](X)

    assert path_of(found, "relu.default") == "teacher"


def test_a_module_that_is_made_inside_another_is_named_by_its_type():
    class Made(nn.Module):
        def forward(self, x):
            return nn.Linear(2, 2)(x)

    model = Made()
    with recording(model=model) as found:
        model(X)

    assert path_of(found, "addmm.default") == "<Linear>"


def test_a_module_that_calls_itself_has_a_call_for_each():
    class Recursive(nn.Module):
        def forward(self, x, depth):
            return self(x, depth - 1) if depth else x * 2

    model = Recursive()
    with recording(model=model) as found:
        model(X, 2)

    assert found.paths == [("", 0), ("", 1), ("", 2)]
    assert found.op("mul.Tensor").call.number == 2


class CheckpointWrapper(nn.Module):
    """Has the name and the attribute by which the real one is known."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module

    def forward(self, *args):
        return self._checkpoint_wrapped_module(*args)


def test_what_a_wrapper_wraps_runs_in_the_wrappers_call():
    model = Block()
    wrapped = CheckpointWrapper(model)
    with recording(model=model) as found:
        wrapped(X)

    assert found.paths.count(("", 0)) == 1


def test_training_mode_is_recorded_a_call():
    model = nn.Linear(2, 2)
    with recording(model=model) as found:
        model(X)
        model.eval()(X)

    assert [call.training for call in found.trace.calls[1:]] == [True, False]


# ---- what ends a call in an unusual way ----------------------------------------------------------------


class Failing(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner, self.error = nn.Linear(2, 2), error

    def forward(self, x):
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [KeyError(), KeyboardInterrupt()])
def test_after_a_module_raised_ops_run_outside_of_it(error: BaseException):
    """torch calls no hook for a KeyboardInterrupt; the next call of the model tells."""
    model = Failing(error)
    with recording(model=model) as found:
        with pytest.raises(type(error)):
            model(X)
        model.error = None
        model(X)
        X * 2

    assert found.paths == [("", 0), ("inner", 0), ("", 1), ("inner", 1)]
    assert found.op("mul.Tensor").call.id == 0


def test_a_hook_of_the_program_that_raises_before_ours_ends_nothing():
    """torch then tells us that a module was left which we never saw entered."""

    def refuse(module, args):
        if isinstance(module, nn.Linear):
            raise KeyError

    class Caught(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            with pytest.raises(KeyError):
                self.inner(x)
            return x * 2

    handle = torch_modules.register_module_forward_pre_hook(refuse)
    model = Caught()
    with recording(model=model) as found:
        model(X)
    handle.remove()

    assert found.op("mul.Tensor").call.path == ""
    assert found.op("mul.Tensor").call.id == 1


class Checkpointed(Model):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        return self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_that_backward_runs_again_is_no_result_of_the_run(reentrant: bool):
    model = Checkpointed(reentrant=reentrant)
    with recording(model=model) as found:
        model(X.clone().requires_grad_()).sum().backward()

    assert [leaf.name for leaf in found.trace.leaves if leaf.kind == "output"] == ["output"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_ops_of_a_part_that_backward_runs_again_are_in_its_scope(reentrant: bool):
    model = Checkpointed(reentrant=reentrant)
    with recording(model=model) as found:
        model(X.clone().requires_grad_()).sum().backward()

    again = [op for op in found.ops if op.name == "aten.relu.default" and op.phase == "backward"]
    assert [op.call.path for op in again] == ["first"]


# ---- threads ----------------------------------------------------------------------------------------------


def in_a_thread(run) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_module_calls_of_other_threads_are_left_out_and_noted():
    model = nn.Linear(2, 2)
    with recording(model=model) as found:
        in_a_thread(lambda: model(X))

    assert found.paths == []
    assert "1 other threads called modules" in found.trace.footer.notes[0]


def test_recorders_of_two_threads_do_not_see_each_others_modules():
    other = []

    def run():
        model = nn.Linear(2, 2)
        with recording(model=model) as found:
            model(X)
        other.append(found)

    model = Model()
    with recording(model=model) as found:
        in_a_thread(run)
        model(X)

    assert other[0].paths == [("", 0)]
    assert len(found.paths) == 5


# ---- scopes by hand -----------------------------------------------------------------------------------------


def test_a_scope_by_hand_is_below_the_present_one():
    class Scoped(nn.Module):
        def forward(self, x):
            with found.recorder.scope("loss"):
                return x * 2

    model = nn.Sequential(Scoped())
    with recording(model=model) as found:
        model(X)

    assert path_of(found, "mul.Tensor") == "0.loss"


def test_after_an_error_in_a_scope_ops_run_outside_of_it():
    with recording() as found:
        with pytest.raises(KeyError), found.recorder.scope("loss"):
            raise KeyError
        X * 2

    assert found.op("mul.Tensor").call.id == 0


def test_after_an_interrupted_module_in_a_scope_ops_run_outside_of_both():
    model = Failing(KeyboardInterrupt())
    with recording(model=model) as found:
        with pytest.raises(KeyboardInterrupt), found.recorder.scope("step"):
            model(X)
        X * 2

    assert found.op("mul.Tensor").call.id == 0


# ---- hooks --------------------------------------------------------------------------------------------------


def test_the_global_hooks_are_gone_after_the_recording():
    before = len(torch_modules._global_forward_hooks)
    with recording():
        during = len(torch_modules._global_forward_hooks)

    assert (during, len(torch_modules._global_forward_hooks)) == (before + 1, before)


# ---- wrappers' names ------------------------------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """Has the name and the attribute by which the real one is known, and needs no process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("layers.0._fsdp_wrapped_module.fc", "layers.0.fc"),
        ("_orig_mod.fc", "fc"),
        ("_fpw_module", ""),
        ("module.fc", "module.fc"),
        ("fc", "fc"),
    ],
)
def test_segments_of_wrappers_are_stripped(path: str, expected: str):
    assert clean(path) == expected


def test_the_segment_module_is_stripped_where_ddp_stands():
    strip = cleaner(nn.Sequential(DistributedDataParallel(Block())))

    assert [strip(path) for path in ("0", "0.module", "0.module.inner.weight")] == [
        "0",
        "0",
        "0.inner.weight",
    ]


def test_the_segment_module_is_kept_where_the_program_means_it():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Block()

    assert cleaner(Holder())("module.inner") == "module.inner"


def test_a_model_has_the_same_paths_with_and_without_ddp():
    model = Model()
    wrapped = DistributedDataParallel(model)
    with recording(model=wrapped) as found:
        wrapped(X)

    assert path_of(found, "relu.default") == "second"
    assert found.leaves("second.inner.weight")


def test_unwrapped_goes_through_all_wrappers():
    model = Block()

    assert unwrapped(CheckpointWrapper(DistributedDataParallel(model))) is model


# ---- names of arguments -------------------------------------------------------------------------------------


class Taker(nn.Module):
    def forward(self, ids, mask=None, *rest, cache=None):
        return ids


def names(*args, **kwargs) -> list[str]:
    return [name for name, _ in name_arguments(Taker(), args, kwargs)]


def test_arguments_are_named_by_the_signature():
    assert names(X, X) == ["ids", "mask"]


def test_arguments_beyond_the_signature_are_numbered():
    assert names(X, X, X) == ["ids", "mask", "args[2]"]


def test_keyword_arguments_keep_their_names():
    assert names(X, cache=X) == ["ids", "cache"]


def test_tensors_inside_structures_are_named_by_their_place():
    assert names([X, {"key": X, 3: X}]) == ["ids[0]", "ids[1].key", "ids[1][3]"]


def test_a_structure_that_contains_itself_is_no_trap():
    loop: list[object] = [X]
    loop.append(loop)

    assert len(names(loop)) == 4
