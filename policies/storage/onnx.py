"""A learned policy's probabilities as an ONNX model, for runtimes that are not Python.

Input `features` [N, F] float32 in the policy's order (unknown values NaN for trees); outputs [N] float32: `accept` and
`next` at depths from 1 on, `next_first` at depth 0. They are calibrated. The stop rule stays outside: it carries S_j from
depth to depth and is a comparison; it travels with names and depths in the model's metadata. Needs the extra
`specstop[onnx]`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PolicyError
from ..files import prepare_output_file, write_atomic
from ..heads.base import Array, kernels
from ..heads.build import LinearHead, MLPHead, TreesHead
from ..learned.calibration import Calibrator
from ..learned.policy import LearnedPolicy

OPSET, ML_OPSET = 17, 3
PRODUCER = "specstop"
ROWS, NEAR = 2000, 2e-4
OUTPUTS = ("accept", "next", "next_first")


class _Graph:
    """Nodes and constants as they are added."""

    def __init__(self, helper: Any, numpy_helper: Any) -> None:
        self.helper, self._constant = helper, numpy_helper.from_array
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def put(self, values: Any, kind: Any = np.float32) -> str:
        """Add a constant and return its name."""
        name = f"c{len(self.constants)}"
        self.constants.append(self._constant(np.array(values, dtype=kind, order="C"), name))
        return name

    def add(self, kind: str, *inputs: str, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        name = out or f"n{len(self.nodes)}"
        self.nodes.append(self.helper.make_node(kind, list(inputs), [name], domain=domain, **attributes))
        return name

    def linear(self, x: str, weight: Array, bias: Array) -> str:
        """Add x W' + b."""
        return self.add("Add", self.add("MatMul", x, self.put(weight.T)), self.put(bias))

    def column(self, x: str, at: int) -> str:
        """Take one column of [N, .] as [N, 1]."""
        return self.add("Gather", x, self.put([at], np.int64), axis=1)

    def within(self, x: str, bounds: Array) -> str:
        """Keep columns [N, F] between bounds [2, F]; unknown ones, NaN, stay so, which `Clip` does not promise."""
        for side, compare in zip(bounds, ("Less", "Greater"), strict=True):
            if np.isfinite(side).any():
                bound = self.put(side)
                x = self.add("Where", self.add(compare, x, bound), bound, x)
        return x


def export_onnx(policy: LearnedPolicy, path: str | Path) -> dict[str, Any]:
    """Write the model and return what was found when onnxruntime ran it beside our own code.

    Args:
        policy: with a head of this package.
        path: of the file; an older export is replaced.

    Returns:
        `path`, `bytes`, and `difference`: the largest over random rows, or None where onnxruntime is not installed.

    Raises:
        PolicyError: onnx is not installed, the head is of another kind, or onnxruntime answers otherwise.
        InputError: as `prepare_output_file`.
    """
    prepare_output_file(
        path, PRODUCER.encode(), overwrite=True, inputs=[policy.source]
    )  # an export names it near its beginning
    model = build_onnx(policy)
    raw = model.SerializeToString()
    found = largest_difference(policy, raw)
    if found is not None and not found <= NEAR:  # NaN is refused as well
        raise PolicyError(
            f"deploy: onnxruntime's answers are up to {found:.1e} off, more than {NEAR:g}; nothing was written"
        )
    write_atomic(Path(path), raw)
    return {"path": str(path), "bytes": len(raw), "difference": found}


def build_onnx(policy: LearnedPolicy) -> Any:
    """Return the policy as an `onnx.ModelProto`."""
    try:
        import onnx
        from onnx import TensorProto, checker, helper, numpy_helper
    except ImportError:
        raise PolicyError('deploy: onnx is not installed; pip install "specstop[onnx]"') from None
    if policy.rule.kind == "gain":
        raise PolicyError(
            "deploy: a tree policy calibrates along paths, which one row does not hold; use `specstop decode`"
        )
    if policy.rule.kind == "continuation":
        raise PolicyError(
            "deploy: a continuation policy has a value in the place of two chances; use `specstop decode`"
        )
    graph = _Graph(helper, numpy_helper)
    later, first = _head(graph, policy)
    for name, logits, at, calibrate in zip(
        OUTPUTS, (later, later, first), (0, 1, 1), (policy.accept, policy.next, policy.next), strict=True
    ):
        probability = _calibrated(graph, graph.column(logits, at), calibrate)
        graph.add("Reshape", probability, graph.put([-1], np.int64), out=name)
    rows = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", len(policy.features)])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in OUTPUTS]
    body = helper.make_graph(graph.nodes, "specstop", [rows], outputs, graph.constants)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
    model = helper.make_model(body, producer_name=PRODUCER, opset_imports=opsets, ir_version=8)
    facts = {"name": policy.name, "features": list(policy.features), "max_depth": policy.max_depth}
    helper.set_model_props(model, {"specstop": json.dumps({**facts, "rule": policy.rule.to_dict()})})
    checker.check_model(model)
    assert isinstance(model, onnx.ModelProto)
    return model


def largest_difference(policy: LearnedPolicy, raw: bytes) -> float | None:
    """Return the largest difference of onnxruntime from our own code over random rows; None where it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    chance = np.random.default_rng(0)
    # Beyond 1, too, where features may lie outside the bounds of a head and its log-odds are clipped.
    x = chance.random((ROWS, len(policy.features))) * (1 + 4 * chance.random((ROWS, 1)))
    if isinstance(policy.head, TreesHead):
        x[chance.random(x.shape) < 0.1] = np.nan
    rows = x.astype(np.float32)
    session = onnxruntime.InferenceSession(raw, providers=["CPUExecutionProvider"])
    found = dict(zip(OUTPUTS, session.run(list(OUTPUTS), {"features": rows}), strict=True))
    accept, next_ = policy.probabilities(rows, 1)
    expected = {"accept": accept, "next": next_, "next_first": policy.probabilities(rows, 0)[1]}
    return max(float(np.abs(found[name] - expected[name]).max()) for name in OUTPUTS)


def _head(graph: _Graph, policy: LearnedPolicy) -> tuple[str, str]:
    """Add the head; return its logits [N, 2] at depths from 1 on, and at depth 0."""
    head = policy.head
    if not isinstance(head, (LinearHead, MLPHead, TreesHead)):
        raise PolicyError(f"deploy: the head {head.kind!r} has no ONNX form; expected logistic, mlp or xgboost")
    # Trees read depth 0 differently by their bounds alone; other heads are folded anew for it.
    same = isinstance(head, TreesHead) and np.array_equal(head.bounds, head.first_bounds)
    later, *first = (_scores(graph, head, first) for first in ((False,) if same else (False, True)))
    return later, first[0] if first else later


def _scores(graph: _Graph, head: LinearHead | MLPHead | TreesHead, first: bool) -> str:
    """Add what a head makes of its features at depth 0 if `first`, else at depths from 1 on."""
    x = graph.within("features", head.first_bounds if first else head.bounds)
    if isinstance(head, TreesHead):
        return _trees(graph, head, x)
    y = _expanded(graph, x, head.basis.odds)
    for at, (weight, bias) in enumerate(head.folded(first)):
        y = graph.linear(y if at == 0 else graph.add("Mul", y, graph.add("Sigmoid", y)), weight, bias)
    return y


def _expanded(graph: _Graph, x: str, odds: Array) -> str:
    """Add the features with the log-odds of the probabilities among them, which stand at `odds`."""
    if not len(odds):
        return x
    least, most = kernels().LEAST_PROBABILITY, kernels().MOST_PROBABILITY
    p = graph.add("Gather", x, graph.put(odds, np.int64), axis=1)
    p = graph.add("Clip", p, graph.put(least), graph.put(most))
    rest = graph.add("Sub", graph.put(1.0), p)
    return graph.add("Concat", x, graph.add("Log", graph.add("Div", p, rest)), axis=1)


def _trees(graph: _Graph, head: TreesHead, x: str) -> str:
    tensors = head.tensors()
    outputs, trees, inner = tensors["feature"].shape
    leaves = inner + 1
    count = outputs * trees
    # Complete trees in heap order: the nodes below n are 2n + 1, where x < threshold, and 2n + 2; the leaves are the last.
    node = np.tile(np.arange(inner + leaves), count)
    tree = np.repeat(np.arange(count), inner + leaves)
    is_leaf = node >= inner

    def spread(values: Array, fill: Any) -> Array:
        flat = values.reshape(count, inner)
        return np.concatenate([flat, np.full((count, leaves), fill, dtype=flat.dtype)], 1).ravel()

    return graph.add(
        "TreeEnsembleRegressor", x, domain="ai.onnx.ml", n_targets=2, post_transform="NONE",
        nodes_treeids=tree.tolist(), nodes_nodeids=node.tolist(),
        nodes_featureids=spread(tensors["feature"], 0).tolist(),
        nodes_values=[float(v) for v in spread(tensors["threshold"], 0.0)],
        nodes_modes=np.where(is_leaf, "LEAF", "BRANCH_LT").tolist(),
        nodes_truenodeids=np.where(is_leaf, 0, 2 * node + 1).tolist(),
        nodes_falsenodeids=np.where(is_leaf, 0, 2 * node + 2).tolist(),
        nodes_missing_value_tracks_true=spread(tensors["missing_left"].astype(np.int64), 0).tolist(),
        target_treeids=tree[is_leaf].tolist(), target_nodeids=node[is_leaf].tolist(),
        target_ids=np.repeat(np.arange(outputs), trees * leaves).tolist(),
        target_weights=tensors["leaf"].reshape(-1).tolist(), base_values=tensors["base"].tolist(),
    )  # fmt: skip


def _calibrated(graph: _Graph, logit: str, calibrate: Calibrator) -> str:
    """Add the map from a logit [N, 1] to a probability [N, 1]."""
    if calibrate.kind != "isotonic":
        return graph.add("Sigmoid", graph.add("Mul", logit, graph.put(calibrate.scale)))
    bounds, start, level, slope = calibrate.pieces
    # The piece is numbered by how many upper bounds are below the logit: ONNX has no search in a sorted row.
    below = graph.add("Cast", graph.add("Less", graph.put(bounds[None]), logit), to=7)  # [N, n + 1] int64
    at = graph.add("ReduceSum", below, graph.put([1], np.int64), keepdims=1)
    first, base, rise = (graph.add("Gather", graph.put(piece), at) for piece in (start, level, slope))
    return graph.add("Add", base, graph.add("Mul", rise, graph.add("Sub", logit, first)))
