"""The load-balancing loss of a mixture of experts. It grows as a router sends tokens to fewer experts. A pure tensor
function.
"""

from __future__ import annotations

import torch
from torch import Tensor


def load_balancing(router_logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the loss E * sum_i f_i P_i of one router, and the ratio of the largest expert load to the mean load.

    f_i is the fraction of tokens that choose expert i among their k experts, and P_i is the mean router probability of
    expert i. The loss is k if loads and probabilities are even, and at most E. f has no gradient. Source: Switch
    Transformer, arXiv 2101.03961, eq. 4 to 6, with k experts per token as in transformers' `load_balancing_loss_func`.

    Args:
        router_logits: [T, E], for all tokens of a micro-batch.
        top_k: k, the number of experts per token.

    Returns:
        Two scalars in the precision of the softmax, fp32 or higher. The second has no gradient.
    """
    experts = router_logits.shape[-1]
    precision = torch.promote_types(router_logits.dtype, torch.float32)
    probabilities = router_logits.softmax(-1, dtype=precision)
    chosen = probabilities.detach().topk(top_k, -1).indices
    load = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0).mean(0)
    return experts * (load * probabilities.mean(0)).sum(), load.max() * experts / top_k
