"""What is known of an overload before it runs."""

from __future__ import annotations

import json
import math

import pytest
import torch

from opdrift.plans import Plan, encode

aten, c10d = torch.ops.aten, torch.ops.c10d


def plan(func) -> Plan:
    return Plan(func, 1)


@pytest.mark.parametrize(
    ("func", "written"),
    [
        (aten.add.Tensor, ()),
        (aten.add_.Tensor, ((0, "self"),)),
        (aten.add.out, ((None, "out"),)),
        (aten._foreach_add_.Scalar, ((0, "self"),)),
        (aten.native_batch_norm.default, ((3, "running_mean"), (4, "running_var"))),
        (c10d.allreduce_.default, ((0, "tensors"),)),
        (c10d._allgather_base_.default, ((0, "output_tensor"),)),
        (aten.resize_.default, ()),
    ],
)
def test_what_an_op_writes_is_known_also_where_its_schema_is_silent(func, written):
    assert plan(func).writes == written


@pytest.mark.parametrize(
    ("func", "facts"),
    [
        (aten.t.default, {"quiet"}),
        (aten.empty.memory_format, {"quiet", "fresh"}),
        (aten.new_empty_strided.default, {"quiet", "fresh"}),
        (aten.resize_.default, {"quiet", "rebinds", "bumps"}),
        (aten.copy_.default, {"reads", "overwrites", "bumps"}),
        (aten.add_.Tensor, {"reads", "bumps"}),
        (aten.add.out, {"reads", "overwrites", "bumps"}),
        (aten.index_copy_.default, {"reads", "scatters", "bumps"}),
        (aten.scatter_.value, {"reads", "scatters", "bumps"}),
        (aten.scatter_.reduce, {"reads", "bumps"}),
        (aten.scatter_add_.default, {"reads", "bumps"}),
        (aten.zeros_like.default, set()),
        (aten.dropout.default, {"reads", "seeded", "composite"}),
        (aten.rand.default, {"reads", "seeded"}),
        (aten._foreach_add_.Scalar, {"reads", "lists_written"}),
        (aten._fused_adam_.default, {"reads"}),
        (aten.item.default, {"reads", "composite", "scalar"}),
        (aten._local_scalar_dense.default, {"reads", "scalar"}),
        (c10d._allgather_base_.default, {"reads", "overwrites", "collective", "waits"}),
        (c10d.allreduce_.default, {"reads", "collective", "waits"}),
        (c10d.scatter_.default, {"reads", "overwrites", "collective", "waits"}),
        (c10d.recv_.default, {"reads", "overwrites", "collective"}),
        (torch.ops._c10d_functional.all_reduce.default, {"quiet", "deferred", "reads"}),
    ],
)
def test_the_facts_of_an_op(func, facts):
    names = (
        *("quiet", "fresh", "rebinds", "reads", "overwrites", "scatters", "bumps", "seeded"),
        *("collective", "waits", "lists_written", "composite", "scalar", "deferred"),
    )
    found = plan(func)

    assert {name for name in names if getattr(found, name)} == facts


def test_a_higher_order_op_is_known_as_one():
    described = json.loads(plan(torch.ops.higher_order.cond).describe())

    assert described["is"] == ["higher_order"]


def test_the_text_of_an_op_names_its_arguments_and_defaults():
    described = json.loads(plan(aten.add_.Tensor).describe())

    assert (described["name"], described["arguments"], described["mutates"]) == (
        "aten.add_.Tensor",
        ["self", "other", "alpha"],
        ["self"],
    )
    assert described["defaults"] == {"alpha": 1}


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (1, 1),
        (True, True),
        (0.5, 0.5),
        ("sum", "sum"),
        (None, None),
        ([1, (2, None)], [1, [2, None]]),
        (math.inf, {"f": "inf"}),
        (-math.inf, {"f": "-inf"}),
        (math.nan, {"f": "nan"}),
        (torch.bfloat16, {"x": "bfloat16"}),
        (torch.device("cpu"), {"x": "cpu"}),
        (1j, {"x": "1j"}),
        (object(), {"x": "object"}),
    ],
)
def test_arguments_become_json(value, encoded):
    assert json.loads(json.dumps(encode(value))) == encoded
