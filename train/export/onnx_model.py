"""A learned policy's probabilities as an ONNX model, for runtimes other than Python.

Input `features` [N, F] float32 in the policy's order (unknown values NaN for trees); outputs [N] float32, calibrated:
`accept` and `next` at depths from 1 on, `next_first` at depth 0. The stop rule is not part of the graph: it carries S_j from
depth to depth and is a comparison. It is in the metadata of the model. Requires the extra `specstop[onnx]`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ...policies.contract import Array
from ...policies.errors import PolicyError
from ...policies.files import prepare_output_file, write_atomic
from ...policies.heads.base import kernels
from ...policies.heads.layers import LinearHead, MLPHead
from ...policies.heads.tables import TreesHead
from ...policies.learned import Calibrator, LearnedPolicy

OPSET, ML_OPSET = 17, 3
PRODUCER = "specstop"
ROWS, TOLERANCE = 2000, 2e-4
"""Random rows on which onnxruntime is compared, and the largest difference."""

OUTPUTS = ("accept", "next", "next_first")


class _Graph:
    """Nodes and constants of a graph under construction."""

    def __init__(self, helper: Any, numpy_helper: Any) -> None:
        self.helper, self._constant = helper, numpy_helper.from_array
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add(self, kind: str, *inputs: Any, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output; inputs that are arrays become constants."""
        names = [value if isinstance(value, str) else self._put(value) for value in inputs]
        name = out or f"n{len(self.nodes)}"
        self.nodes.append(self.helper.make_node(kind, names, [name], domain=domain, **attributes))
        return name

    def _put(self, value: Any) -> str:
        values = np.array(value, order="C")
        self.constants.append(
            self._constant(values if values.dtype == np.int64 else values.astype(np.float32), f"c{len(self.constants)}")
        )
        return str(self.constants[-1].name)


def export_onnx(policy: LearnedPolicy, path: str | Path) -> dict[str, Any]:
    """Write the model and return `path`, `bytes` and `difference` (None if onnxruntime is not installed).

    Raises:
        PolicyError: onnx is not installed, the head has no ONNX form, or the difference is too large.
        InputError: see `prepare_output_file`.
    """
    prepare_output_file(path, PRODUCER.encode(), overwrite=True, inputs=[policy.source])
    raw = build_onnx(policy).SerializeToString()
    difference = largest_difference(policy, raw)
    if difference is not None and not difference <= TOLERANCE:  # NaN too
        raise PolicyError(
            f"deploy: onnxruntime differs by {difference:.1e}, more than {TOLERANCE:g}; nothing was written"
        )
    write_atomic(Path(path), raw)
    return {"path": str(path), "bytes": len(raw), "difference": difference}


def build_onnx(policy: LearnedPolicy) -> Any:
    """Return the policy as an `onnx.ModelProto`."""
    try:
        import onnx
        from onnx import TensorProto, checker, helper, numpy_helper
    except ImportError:
        raise PolicyError('deploy: onnx is not installed; pip install "specstop[onnx]"') from None
    head = policy.head
    if policy.rule.kind == "gain" or not isinstance(head, LinearHead | MLPHead | TreesHead):
        raise PolicyError(
            f"deploy: a policy with the rule {policy.rule.kind} and the head {head.kind} has no ONNX form: expected a head "
            "logistic, mlp or xgboost, and not the rule gain; use `specstop decode`"
        )
    graph = _Graph(helper, numpy_helper)
    later = first = _scores(graph, head, first=False)
    # Trees differ at depth 0 by their bounds only.
    if not isinstance(head, TreesHead) or not np.array_equal(*head.bounds):
        first = _scores(graph, head, first=True)
    maps = (policy.accept, policy.next, policy.next)
    for name, logits, column, calibrator in zip(OUTPUTS, (later, later, first), (0, 1, 1), maps, strict=True):
        logit = graph.add("Gather", logits, [column], axis=1)
        graph.add("Reshape", _calibrated(graph, logit, calibrator), [-1], out=name)
    rows = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", len(policy.features)])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in OUTPUTS]
    body = helper.make_graph(graph.nodes, "specstop", [rows], outputs, graph.constants)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
    model = helper.make_model(body, producer_name=PRODUCER, opset_imports=opsets, ir_version=8)
    metadata = {"name": policy.name, "features": list(policy.features), "max_depth": policy.max_depth}
    helper.set_model_props(model, {"specstop": json.dumps({**metadata, "rule": policy.rule.to_dict()})})
    checker.check_model(model)
    assert isinstance(model, onnx.ModelProto)
    return model


def largest_difference(policy: LearnedPolicy, raw: bytes) -> float | None:
    """Return the largest difference of onnxruntime from our code on random rows; None if it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    generator = np.random.default_rng(0)
    # Beyond 1 too, where features may lie outside the bounds of a head and its log-odds are clipped.
    x = generator.random((ROWS, len(policy.features))) * (1 + 4 * generator.random((ROWS, 1)))
    if isinstance(policy.head, TreesHead):
        x[generator.random(x.shape) < 0.1] = np.nan
    rows = x.astype(np.float32)
    session = onnxruntime.InferenceSession(raw, providers=["CPUExecutionProvider"])
    expected = (*policy.probabilities(rows, 1), policy.probabilities(rows, 0)[1])
    actual = session.run(list(OUTPUTS), {"features": rows})
    return max(float(np.abs(a - e).max()) for a, e in zip(actual, expected, strict=True))


def _scores(graph: _Graph, head: LinearHead | MLPHead | TreesHead, first: bool) -> str:
    """Add the head and return its logits [N, 2], at depth 0 if `first`."""
    x = "features"
    for bound, compare in zip(head.bounds[first], ("Less", "Greater"), strict=True):
        if np.isfinite(bound).any():  # not `Clip`, which need not keep NaN
            x = graph.add("Where", graph.add(compare, x, bound), bound, x)
    if isinstance(head, TreesHead):
        return _trees(graph, head, x)
    if len(head.basis.odds):
        p = graph.add("Gather", x, head.basis.odds, axis=1)
        p = graph.add("Clip", p, kernels().MIN_PROBABILITY, kernels().MAX_PROBABILITY)
        odds = graph.add("Div", p, graph.add("Sub", 1.0, p))
        x = graph.add("Concat", x, graph.add("Log", odds), axis=1)
    for number, (weight, bias) in enumerate(head.layers[first]):
        x = graph.add("Mul", x, graph.add("Sigmoid", x)) if number else x
        x = graph.add("Add", graph.add("MatMul", x, weight.T), bias)
    return x


def _trees(graph: _Graph, head: TreesHead, x: str) -> str:
    tensors = head.tensors()
    outputs, trees, inner = tensors["feature"].shape
    leaves, count = inner + 1, outputs * trees
    # Complete trees in heap order: the children of n are 2n + 1, where x < threshold, and 2n + 2; the leaves are last.
    node, tree = np.tile(np.arange(inner + leaves), count), np.repeat(np.arange(count), inner + leaves)
    is_leaf = node >= inner

    def padded(values: Array) -> Any:
        flat = values.reshape(count, inner)
        return np.concatenate([flat, np.zeros((count, leaves), dtype=flat.dtype)], 1).ravel().tolist()

    return graph.add(
        "TreeEnsembleRegressor", x, domain="ai.onnx.ml", n_targets=2, post_transform="NONE",
        nodes_treeids=tree.tolist(), nodes_nodeids=node.tolist(),
        nodes_featureids=padded(tensors["feature"]), nodes_values=padded(tensors["threshold"]),
        nodes_modes=np.where(is_leaf, "LEAF", "BRANCH_LT").tolist(),
        nodes_truenodeids=np.where(is_leaf, 0, 2 * node + 1).tolist(),
        nodes_falsenodeids=np.where(is_leaf, 0, 2 * node + 2).tolist(),
        nodes_missing_value_tracks_true=padded(tensors["missing_left"].astype(np.int64)),
        target_treeids=tree[is_leaf].tolist(), target_nodeids=node[is_leaf].tolist(),
        target_ids=np.repeat(np.arange(outputs), trees * leaves).tolist(),
        target_weights=tensors["leaf"].reshape(-1).tolist(), base_values=tensors["base"].tolist(),
    )  # fmt: skip


def _calibrated(graph: _Graph, logit: str, calibrator: Calibrator) -> str:
    """Add the map from a logit [N, 1] to a probability [N, 1]."""
    if calibrator.kind != "isotonic":
        return graph.add("Sigmoid", graph.add("Mul", logit, calibrator.pieces[0, 0]))
    bounds, *lines = calibrator.pieces
    # The index of the piece is the number of upper bounds below the logit: ONNX has no search in a sorted row.
    is_below = graph.add("Cast", graph.add("Less", bounds[None], logit), to=7)  # [N, n + 1] int64
    piece = graph.add("ReduceSum", is_below, [1], keepdims=1)
    start, value, slope = (graph.add("Gather", line, piece) for line in lines)
    return graph.add("Add", value, graph.add("Mul", slope, graph.add("Sub", logit, start)))
