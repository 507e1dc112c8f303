"""A learned policy's probabilities as an ONNX model, for runtimes that are not torch.

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
import torch
from torch import Tensor

from .calibration import Calibrator
from .errors import PolicyError
from .files import write_atomic
from .heads import EDGES, Basis, LinearHead, MLPHead, TreesHead
from .learned import LearnedPolicy
from .outputs import claim_file

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
        array = values.detach().numpy() if isinstance(values, Tensor) else np.asarray(values)
        self.constants.append(self._constant(np.ascontiguousarray(array, dtype=kind), name))
        return name

    def add(self, kind: str, *inputs: str, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        name = out or f"n{len(self.nodes)}"
        self.nodes.append(self.helper.make_node(kind, list(inputs), [name], domain=domain, **attributes))
        return name

    def linear(self, x: str, weight: Tensor, bias: Tensor) -> str:
        """Add x W' + b."""
        return self.add("Add", self.add("MatMul", x, self.put(weight.T)), self.put(bias))

    def column(self, x: str, at: int) -> str:
        """Take one column of [N, .] as [N, 1]."""
        return self.add("Gather", x, self.put([at], np.int64), axis=1)


def export_onnx(policy: LearnedPolicy, path: str | Path) -> dict[str, Any]:
    """Write the model and return what was found when onnxruntime ran it beside torch.

    Args:
        policy: with a head of this package.
        path: of the file; an older export is replaced.

    Returns:
        `path`, `bytes`, and `difference`: the largest over random rows, or None where onnxruntime is not installed.

    Raises:
        PolicyError: onnx is not installed, the head is of another kind, or onnxruntime answers otherwise.
        InputError: as `claim_file`.
    """
    claim_file(path, PRODUCER.encode(), overwrite=True, inputs=[policy.source])
    model = build_onnx(policy)
    raw = model.SerializeToString()
    found = largest_difference(policy, raw)
    if found is not None and not found <= NEAR:
        raise PolicyError(
            f"deploy: onnxruntime answers {found:.1e} beside torch, more than {NEAR:g}; nothing was written"
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
        OUTPUTS, (later, later, first), (0, 1, 1), (policy.accept, policy.following, policy.following), strict=True
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
    """Return the largest difference of onnxruntime from torch over random rows; None where it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(ROWS, len(policy.features), generator=generator) * (1 + 4 * torch.rand(ROWS, 1, generator=generator))
    if isinstance(policy.head, TreesHead):
        x[torch.rand(x.shape, generator=generator) < 0.1] = float("nan")
    session = onnxruntime.InferenceSession(raw, providers=["CPUExecutionProvider"])
    found = dict(zip(OUTPUTS, session.run(list(OUTPUTS), {"features": x.numpy()}), strict=True))
    accept, following = policy.probabilities(x, 1)
    expected = {"accept": accept, "next": following, "next_first": policy.probabilities(x, 0)[1]}
    return max(float(np.abs(found[name] - expected[name].numpy()).max()) for name in OUTPUTS)


def _head(graph: _Graph, policy: LearnedPolicy) -> tuple[str, str]:
    """Add the head; return its logits [N, 2] at depths from 1 on, and at depth 0."""
    head = policy.head
    if isinstance(head, TreesHead):
        logits = _trees(graph, head)
        return logits, logits
    if not isinstance(head, (LinearHead, MLPHead)):
        raise PolicyError(f"deploy: the head {head.kind!r} has no ONNX form; expected logistic, mlp or xgboost")
    x = _expanded(graph, head.basis)
    both = []
    for layers in head.folded():
        y = x
        for at, (weight, bias) in enumerate(layers):
            y = graph.linear(y if at == 0 else graph.add("Mul", y, graph.add("Sigmoid", y)), weight, bias)
        both.append(y)
    return both[0], both[1]


def _expanded(graph: _Graph, basis: Basis) -> str:
    """Add the features with the log-odds of the probabilities among them."""
    odds = basis.probabilities
    if not odds:
        return "features"
    p = graph.add("Gather", "features", graph.put(odds, np.int64), axis=1)
    p = graph.add("Clip", p, graph.put(EDGES[0]), graph.put(EDGES[1]))
    rest = graph.add("Sub", graph.put(1.0), p)
    return graph.add("Concat", "features", graph.add("Log", graph.add("Div", p, rest)), axis=1)


def _trees(graph: _Graph, head: TreesHead) -> str:
    tensors = head.tensors()
    outputs, trees, inner = tensors["feature"].shape
    leaves = inner + 1
    count = outputs * trees
    node = np.tile(np.arange(inner + leaves), count)
    tree = np.repeat(np.arange(count), inner + leaves)
    is_leaf = node >= inner

    def spread(values: Tensor, fill: Any) -> Any:
        flat = values.reshape(count, inner).numpy()
        return np.concatenate([flat, np.full((count, leaves), fill, dtype=flat.dtype)], 1).ravel()

    return graph.add(
        "TreeEnsembleRegressor", "features", domain="ai.onnx.ml", n_targets=2, post_transform="NONE",
        nodes_treeids=tree.tolist(), nodes_nodeids=node.tolist(),
        nodes_featureids=spread(tensors["feature"], 0).tolist(),
        nodes_values=[float(v) for v in spread(tensors["threshold"], 0.0)],
        nodes_modes=np.where(is_leaf, "LEAF", "BRANCH_LT").tolist(),
        nodes_truenodeids=np.where(is_leaf, 0, 2 * node + 1).tolist(),
        nodes_falsenodeids=np.where(is_leaf, 0, 2 * node + 2).tolist(),
        nodes_missing_value_tracks_true=spread(tensors["missing_left"].long(), 0).tolist(),
        target_treeids=tree[is_leaf].tolist(), target_nodeids=node[is_leaf].tolist(),
        target_ids=np.repeat(np.arange(outputs), trees * leaves).tolist(),
        target_weights=tensors["leaf"].reshape(-1).tolist(), base_values=tensors["base"].tolist(),
    )  # fmt: skip


def _calibrated(graph: _Graph, logit: str, calibrate: Calibrator) -> str:
    """Add the map from a logit [N, 1] to a probability [N, 1]."""
    if calibrate.scale is not None:
        return graph.add("Sigmoid", graph.add("Mul", logit, graph.put(calibrate.scale)))
    bounds, start, level, slope = calibrate.pieces()
    below = graph.add("Cast", graph.add("Less", graph.put(bounds[None]), logit), to=7)  # [N, n] int64
    at = graph.add("ReduceSum", below, graph.put([1], np.int64), keepdims=1)
    first, base, rise = (graph.add("Gather", graph.put(piece), at) for piece in (start, level, slope))
    return graph.add("Add", base, graph.add("Mul", rise, graph.add("Sub", logit, first)))
