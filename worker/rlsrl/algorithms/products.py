"""Large products of matrices in compiled code, by oneDNN instead of MKL.

256 x 256 x 256 takes MKL 293 us on an AMD EPYC, where it does not use AVX-512, and oneDNN 143 us. A call of MKL is
shorter, so small products stay with it. torch uses MKL for eager products, and has oneDNN in compiled code for constant
weights alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import permute, register_lowering
from torch._inductor.mkldnn_ir import LinearUnary
from torch.fx import Graph, Node
from typing_extensions import override

from rlsrl.policies.products import MKL_OPERATIONS

_LIBRARY = torch.library.Library("rlsrl", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("product(Tensor a, Tensor b, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
_ATEN, _PRODUCT = torch.ops.aten, torch.ops.rlsrl.product.default


class LargeProductsByOneDnn(CustomGraphPass):
    """Replaces ``aten``'s products of float32 matrices on the CPU. Pairs of matrices are multiplied one by one."""

    @override
    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if (made := _MAKERS.get(node.target)) is not None and not node.kwargs and _is_large(*node.args[-2:]):
                with graph.inserting_before(node):
                    product = made(graph, *node.args)
                product.meta = dict(node.meta)
                node.replace_all_uses_with(product)
                graph.erase_node(node)

    @override
    def uuid(self) -> bytes:
        """Return what names this code in torch's cache of compiled graphs."""
        return get_hash_for_files((__file__,))


def _is_large(a: Node, b: Node) -> bool:
    first, second = _value(a), _value(b)
    operations = 2 * first.shape[-2] * first.shape[-1] * second.shape[-1]
    return first.dtype == torch.float32 and first.device.type == "cpu" and operations > MKL_OPERATIONS


def _value(node: Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _added(graph: Graph, target: Callable[..., Any], *arguments: Any) -> Node:
    """Add a call, with an example of its result, as inductor's passes want it."""
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*torch.fx.map_arg(arguments, _value))
    return node


def _of_two(graph: Graph, a: Node, b: Node) -> Node:
    return _added(graph, _PRODUCT, a, b, None)


def _of_two_and_bias(graph: Graph, bias: Node, a: Node, b: Node) -> Node:
    if _value(bias).dim() == 1:
        return _added(graph, _PRODUCT, a, b, bias)
    return _added(graph, _ATEN.add.Tensor, _of_two(graph, a, b), bias)


def _of_pairs(graph: Graph, a: Node, b: Node) -> Node:
    def matrix(of: Node, place: int) -> Node:
        return _added(graph, _ATEN.select.int, of, 0, place)

    products = [_of_two(graph, matrix(a, place), matrix(b, place)) for place in range(len(_value(a)))]
    return _added(graph, _ATEN.cat.default, [_added(graph, _ATEN.unsqueeze.default, each, 0) for each in products])


def _of_pairs_and_bias(graph: Graph, bias: Node, a: Node, b: Node) -> Node:
    return _added(graph, _ATEN.add.Tensor, _of_pairs(graph, a, b), bias)


_MAKERS: dict[Any, Callable[..., Node]] = {
    _ATEN.mm.default: _of_two,
    _ATEN.addmm.default: _of_two_and_bias,
    _ATEN.bmm.default: _of_pairs,
    _ATEN.baddbmm.default: _of_pairs_and_bias,
}
"""Makes each product by ``_PRODUCT``, from its arguments. The last two are the matrices."""


@torch.library.register_fake("rlsrl::product", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _like_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    del bias
    return a.new_empty(a.shape[0], b.shape[1])


@register_lowering(_PRODUCT, type_promotion_kind=None)
def _lowered(a: Any, b: Any, bias: Any) -> Any:
    """Return inductor's node for ``a @ b + bias``. oneDNN multiplies by the transpose of a weight [out, in]."""
    created = LinearUnary.create(a, permute(b, [1, 0]), bias, "none", [], "")  # type: ignore[no-untyped-call]
    return ir.TensorBox.create(created)
