"""The losses, their gradients and their metrics in plain numpy and float64, token by token, from the papers' formulas.

Shares nothing with the package: one loop a sequence, no tensors, no autograd. The gradient is the derivative by hand.
"""

import math

import numpy as np

LENGTHS = (3, 7, 1, 5, 0, 2, 7)
SPANS = ((1, 1, 0), (1, 1, 1, 2, 2, 0, 0), (0,), (0,) * 5, (), (1, 0), (1, 1, 2, 3, 3, 3, 0))
"""Number of each token's old span, 0 for those of the sample's newest version."""
CAP, BAND, LENGTH = 1.3, {"token-mask": (0.8, 1.4), "sequence-mask": (0.9, 1.15)}, 9


class Batch:
    """Logprobs of ragged rows under four policies; those of the rollout differ from the current ones by `shift`."""

    def __init__(self, shift=0.4, seed=8):
        rng = np.random.default_rng(seed)
        shape = (len(LENGTHS), max(LENGTHS))
        self.mask = np.array([[float(t < n) for t in range(shape[1])] for n in LENGTHS])
        self.logprobs = -rng.exponential(size=shape) - 0.05
        self.rollout = self.logprobs + shift * rng.normal(size=shape)
        self.proximal = self.logprobs + 0.5 * shift * rng.normal(size=shape)
        self.reference = self.logprobs + 0.5 * rng.normal(size=shape)
        self.entropy = rng.exponential(size=shape)
        self.advantages = rng.normal(size=shape[0])
        self.spans = np.array([[*ids, *[0] * (shape[1] - len(ids))] for ids in SPANS])


def correction(kind, rho):
    """Weights of one sequence's tokens and which of them the correction changed; `rho` is proximal / rollout."""
    if not rho:
        return [], []
    low, high = BAND.get(kind, (0.0, math.inf))
    if kind == "token-truncate":
        return [min(x, CAP) for x in rho], [x > CAP for x in rho]
    if kind == "sequence-truncate":
        whole = math.prod(rho)
        return [min(whole, CAP)] * len(rho), [whole > CAP] * len(rho)
    if kind == "token-mask":
        return [x if low <= x <= high else 0.0 for x in rho], [not low <= x <= high for x in rho]
    if kind == "sequence-mask":
        inside = low <= math.prod(rho) ** (1 / len(rho)) <= high
        return [x * inside for x in rho], [not inside] * len(rho)
    return list(rho) if kind == "decoupled" else [1.0] * len(rho), [False] * len(rho)


def by_span(kind, rho, ids):
    """The same where old spans have one weight each, and which tokens' spans are capped."""
    weights, changed, capped = [0.0] * len(rho), [False] * len(rho), [False] * len(rho)
    for span in set(ids):
        places = [t for t in range(len(rho)) if ids[t] == span]
        inside = [rho[t] for t in places]
        mean = math.prod(inside) ** (1 / len(inside))
        w, touched = correction(kind, inside) if span == 0 else ([min(mean, CAP)] * len(inside), [False] * len(inside))
        for at, t in enumerate(places):
            weights[t], changed[t], capped[t] = w[at], touched[at], span > 0 and mean > CAP
    return weights, changed, capped


def kl(estimator, current, reference):
    """Value and derivative of a KL estimate by the current logprob, Schulman's k1, k2 and k3."""
    ratio = math.exp(reference - current)
    values = {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}
    slopes = {"k1": 1.0, "k2": -math.log(ratio), "k3": 1 - ratio}
    return values[estimator], slopes[estimator]


def surrogate(kind, ratio, advantage, low, high):
    """Loss (without CISPO's logprob), its derivative by the ratio's log, and whether it is clipped below, above."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    if kind == "cispo":
        return -bounded * advantage, None, ratio < 1 - low, ratio > 1 + high
    below, above = ratio < 1 - low and advantage < 0, ratio > 1 + high and advantage > 0
    return -min(ratio * advantage, bounded * advantage), 0.0 if below or above else -ratio * advantage, below, above


def share(aggregation, length):
    """What one token of a sequence of this length counts in the batch's loss."""
    sequences = sum(n > 0 for n in LENGTHS)
    return {
        "token-mean": 1 / sum(LENGTHS),
        "sequence-mean": 1 / (length * sequences) if length else 0.0,
        "constant": 1 / (sequences * LENGTH),
    }[aggregation]


class Reference:
    """Loss, gradient by logprobs and by entropy, and metrics of a batch under an objective."""

    def __init__(self, batch, o):
        tokens, sequences = sum(LENGTHS), sum(n > 0 for n in LENGTHS)
        self.loss = 0.0
        self.gradient = np.zeros_like(batch.logprobs)
        self.entropy_gradient = -o.entropy_coef / tokens * batch.mask
        ratios, lows, highs, weights, changed, drifts, kls, entropies = [], [], [], [], [], [], [], []
        spans_capped, used = [], []
        for row, n in enumerate(LENGTHS):
            current, rollout = batch.logprobs[row, :n], batch.rollout[row, :n]
            ids = SPANS[row] if o.span_policy == "correct" else (0,) * n
            near = [o.correction != "none" or span > 0 for span in ids]
            base = np.where(near, batch.proximal[row, :n], rollout) if n else rollout
            advantage = batch.advantages[row]
            w, touched, capped = by_span(o.correction, list(np.exp(base - rollout)), ids)
            weights, changed, spans_capped = weights + w, changed + touched, spans_capped + capped
            by_sequence = o.ratio_level == "sequence"
            if by_sequence and n:
                ratios.append(math.prod(np.exp(current - rollout)) ** (1 / n))
            for t in range(n):
                ratio = math.exp(current[t] - base[t])
                if by_sequence:
                    ratio = math.prod(np.exp(current - base)) ** (1 / n)
                else:
                    ratios.append(math.exp(current[t] - rollout[t]))
                    used.append(w[t] if near[t] else ratios[-1])
                value, slope, low, high = surrogate(o.surrogate, ratio, advantage, o.clip_low, o.clip_high)
                part = share(o.aggregation, n) * w[t]
                if slope is None:
                    self.loss += part * value * current[t]
                    self.gradient[row, t] += part * value
                elif by_sequence:
                    self.loss += part * value
                    self.gradient[row, :n] += part * slope / n
                else:
                    self.loss += part * value
                    self.gradient[row, t] += part * slope
                if not by_sequence or t == 0:
                    lows.append(low)
                    highs.append(high)
                divergence, divergence_slope = kl(o.kl_estimator, current[t], batch.reference[row, t])
                self.loss += o.kl_coef * share(o.aggregation, n) * divergence
                self.gradient[row, t] += o.kl_coef * share(o.aggregation, n) * divergence_slope
                kls.append(divergence)
                drift = math.exp(current[t] - rollout[t])
                drifts.append(drift - 1 - math.log(drift))
                entropies.append(batch.entropy[row, t])
        self.loss -= o.entropy_coef * sum(entropies) / tokens
        if o.correction != "none" or o.ratio_level == "sequence":
            used = ratios if o.correction == "none" else weights
        units = sequences if o.ratio_level == "sequence" else tokens
        self.metrics = {
            "loss": self.loss,
            "entropy": sum(entropies) / tokens,
            "approx_kl": sum(drifts) / tokens,
            "ratio_mean": sum(ratios) / units,
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "clip_fraction_low": sum(lows) / units,
            "clip_fraction_high": sum(highs) / units,
            "effective_sample_size": sum(used) ** 2 / sum(x * x for x in used) / len(used),
        }
        if o.kl_coef:
            self.metrics["kl"] = sum(kls) / tokens
        if o.correction != "none":
            name = "truncated_fraction" if "truncate" in o.correction else "masked_fraction"
            self.metrics[name] = sum(changed) / tokens
        if o.span_policy == "correct":
            self.metrics["span_truncated_fraction"] = sum(spans_capped) / tokens
