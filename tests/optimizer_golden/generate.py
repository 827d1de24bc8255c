#!/usr/bin/python3
"""Runs PyTorch's own optimizers and writes what they do to `vectors.json`, for src/optimizer/pytorch.rs.

    /usr/bin/python3 tests/optimizer_golden/generate.py        (Debian: apt-get install python3-torch)

Weights and gradients are not stored: both sides compute them from the same counter-based formula (see `value`), exact
in f32. Stored are the weights after some steps, as the bits of f32, with the version of PyTorch that made them.
"""

import json
import pathlib
import re

import numpy
import torch

DIM = 17
STEPS = [1, 2, 10, 100, 1000]
MASK = (1 << 64) - 1


def mix64(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def value(stream, step, column):
    """A number in [-1, 1) with 24 bits, exact in f32."""
    bits = mix64((stream << 40) ^ (step << 20) ^ column) >> 40
    return numpy.float32(bits) * numpy.float32(2.0**-23) - numpy.float32(1.0)


def row(stream, step):
    return torch.from_numpy(numpy.array([value(stream, step, column) for column in range(DIM)], dtype=numpy.float32))


def exact(number):
    """As the table definition carries it: f32."""
    return float(numpy.float32(number))


CASES = []
for weight_decay in [0.0, 0.01]:
    CASES.append({"rule": "sgd", "lr": 0.05, "weight_decay": weight_decay})
    CASES.append({"rule": "adagrad", "lr": 0.05, "eps": 1e-10, "initial_accumulator": 0.0, "weight_decay": weight_decay})
    CASES.append({"rule": "adagrad", "lr": 0.5, "eps": 1e-6, "initial_accumulator": 0.1, "weight_decay": weight_decay})
    CASES.append({"rule": "adam", "lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": weight_decay})
    CASES.append({"rule": "adam", "lr": 0.05, "beta1": 0.5, "beta2": 0.9, "eps": 1e-4, "weight_decay": weight_decay})

# New cases go to the end: a case's number chooses its weights and gradients.
for weight_decay in [0.0, 0.01]:
    base = {"lr": 0.01, "weight_decay": weight_decay}
    CASES.append(dict(base, rule="momentum", momentum=0.9, dampening=0.0, nesterov=False))
    CASES.append(dict(base, rule="momentum", momentum=0.9, dampening=0.5, nesterov=False))
    CASES.append(dict(base, rule="momentum", momentum=0.9, dampening=0.0, nesterov=True))
    CASES.append(dict(base, rule="rowwise_adagrad", eps=1e-8, initial_accumulator=0.1))
    CASES.append(dict(base, rule="rmsprop", alpha=0.9, eps=1e-6, momentum=0.0, centered=False))
    CASES.append(dict(base, rule="rmsprop", alpha=0.9, eps=1e-6, momentum=0.5, centered=False))
    CASES.append(dict(base, rule="rmsprop", alpha=0.9, eps=1e-3, momentum=0.5, centered=True))
    CASES.append(dict(base, rule="adamw", beta1=0.9, beta2=0.999, eps=1e-8))


class RowwiseAdagrad(torch.optim.Optimizer):
    """PyTorch itself has none: the formula of FBGEMM's EXACT_ROWWISE_ADAGRAD, for one row, in PyTorch's arithmetic."""

    def __init__(self, params, lr, weight_decay, initial, eps):
        super().__init__(params, {"lr": lr})
        self.weight_decay, self.eps, self.sum = weight_decay, eps, torch.tensor(initial, dtype=torch.float32)

    @torch.no_grad()
    def step(self):
        weights = self.param_groups[0]["params"][0]
        gradient = weights.grad.add(weights, alpha=self.weight_decay)
        self.sum = self.sum + gradient.pow(2).mean()
        weights.addcdiv_(gradient, (self.sum.sqrt() + self.eps).expand_as(gradient), value=-self.param_groups[0]["lr"])


def optimizer(case, weights):
    decay = exact(case["weight_decay"])
    if case["rule"] == "sgd":
        return torch.optim.SGD([weights], lr=exact(case["lr"]), weight_decay=decay)
    if case["rule"] == "adagrad":
        return torch.optim.Adagrad(
            [weights],
            lr=exact(case["lr"]),
            lr_decay=0.0,
            weight_decay=decay,
            initial_accumulator_value=exact(case["initial_accumulator"]),
            eps=exact(case["eps"]),
        )
    lr, momentum = exact(case["lr"]), exact(case.get("momentum", 0.0))
    if case["rule"] == "momentum":
        dampening, nesterov = exact(case["dampening"]), case["nesterov"]
        return torch.optim.SGD(
            [weights], lr=lr, momentum=momentum, dampening=dampening, weight_decay=decay, nesterov=nesterov
        )
    if case["rule"] == "rowwise_adagrad":
        return RowwiseAdagrad([weights], lr, decay, exact(case["initial_accumulator"]), exact(case["eps"]))
    if case["rule"] == "rmsprop":
        alpha, eps = exact(case["alpha"]), exact(case["eps"])
        return torch.optim.RMSprop(
            [weights], lr=lr, alpha=alpha, eps=eps, weight_decay=decay, momentum=momentum, centered=case["centered"]
        )
    betas = (exact(case["beta1"]), exact(case["beta2"]))
    if case["rule"] == "adamw":
        return torch.optim.AdamW([weights], lr=lr, betas=betas, eps=exact(case["eps"]), weight_decay=decay)
    return torch.optim.Adam([weights], lr=exact(case["lr"]), betas=betas, eps=exact(case["eps"]), weight_decay=decay)


def run(number, case):
    weights = torch.nn.Parameter(row(2 * number, 0))
    rule = optimizer(case, weights)
    after = {}
    for step in range(1, max(STEPS) + 1):
        weights.grad = row(2 * number + 1, step)
        rule.step()
        if step in STEPS:
            after[str(step)] = [int(bits) for bits in weights.detach().numpy().view(numpy.uint32)]
    return dict(case, weights=after)


def main():
    torch.set_num_threads(1)
    vectors = {"pytorch": torch.__version__, "dim": DIM, "cases": [run(n, case) for n, case in enumerate(CASES)]}
    path = pathlib.Path(__file__).with_name("vectors.json")
    lines = json.dumps(vectors, indent=1)
    # One line a vector: readable diffs, small file.
    lines = re.sub(r"\[\s+((?:\d+,?\s*)+)\]", lambda m: "[" + " ".join(m[1].split()) + "]", lines)
    path.write_text(lines + "\n")


if __name__ == "__main__":
    main()
