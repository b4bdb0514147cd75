"""The paper's numbers as printed, by the labels of our rows: mean and deviation where it has one.

Accuracies in %. Sizes and costs in MB, as the paper counts them: the model of all clients together; costs for each
task, all clients and rounds together. A number that is printed in GB is that times 1000.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.repro import Published

Numbers = Mapping[str, Mapping[str, Published]]

Size = float | None


def _row(
    accuracy: Published, forgetting: Published | None, model: Size, up: Size = None, down: Size = None
) -> dict[str, Published]:
    found: dict[str, Published] = {"accuracy": accuracy}
    if forgetting is not None:
        found["forgetting"] = forgetting
    for key, value in (("model", model), ("up", up), ("down", down)):
        if value is not None:
            found[key] = (value, None)
    return found


def some(numbers: Numbers, *measures: str) -> Numbers:
    """Some of the measures alone."""
    return {label: {key: row[key] for key in measures if key in row} for label, row in numbers.items()}


# table:n_clients, 100 clients, F = 0.05, R = 20, Overlapped-CIFAR-100
CLIENTS_100: Numbers = {
    "fedprox": _row((24.11, 0.44), (0.14, 0.01), 1220),
    "fedcurv": _row((29.11, 0.20), (0.09, 0.02), 1220),
    "fedprox+stable-sgd": _row((22.29, 0.51), (0.14, 0.01), 1220),
    "fedprox+apd": _row((32.55, 0.29), (0.02, 0.01), 6970),
    "fedweit": _row((39.58, 0.27), (0.01, 0.00), 4030),
    "stl": _row((32.96, 0.23), None, 12200),
}

# table:main1, upper half: NonIID-50, 5 clients, F = 1, R = 20
NONIID_50: Numbers = {
    "ewc": _row((74.24, 0.11), (0.10, 0.01), 61),
    "stable-sgd": _row((76.22, 0.26), (0.14, 0.01), 61),
    "apd": _row((81.42, 0.89), (0.02, 0.01), 90),
    "fedprox": _row((68.03, 2.14), (0.17, 0.01), 61, 1220, 1220),
    "scaffold": _row((30.84, 1.41), (0.11, 0.02), 61, 2440, 2440),
    "fedcurv": _row((72.39, 0.32), (0.13, 0.02), 61, 1220, 1220),
    "fedprox+ewc": _row((68.27, 0.72), (0.12, 0.01), 61, 1220, 1220),
    "fedprox+stable-sgd": _row((75.02, 1.44), (0.12, 0.01), 79, 1220, 1220),
    "fedprox+apd": _row((81.20, 1.52), (0.01, 0.01), 79, 1220, 1220),
    "fedweit": _row((84.11, 0.27), (0.00, 0.00), 78, 370, 1080),
    "stl": _row((85.78, 0.17), None, 610),
}

# its lower half: Overlapped-CIFAR-100
OVERLAPPED_CIFAR_100: Numbers = {
    "ewc": _row((44.26, 0.53), (0.13, 0.01), 61),
    "stable-sgd": _row((43.31, 0.44), (0.08, 0.01), 61),
    "apd": _row((50.82, 0.41), (0.02, 0.01), 73),
    "fedprox": _row((38.96, 0.37), (0.13, 0.02), 61, 1220, 1220),
    "scaffold": _row((22.80, 0.47), (0.09, 0.01), 61, 2440, 2440),
    "fedcurv": _row((40.36, 0.44), (0.15, 0.02), 61, 1220, 1220),
    "fedprox+ewc": _row((41.53, 0.39), (0.13, 0.01), 61, 1220, 1220),
    "fedprox+stable-sgd": _row((43.29, 1.45), (0.07, 0.01), 61, 1220, 1220),
    "fedprox+apd": _row((52.20, 0.50), (0.02, 0.01), 75, 1220, 1220),
    "fedweit": _row((55.16, 0.19), (0.01, 0.00), 75, 370, 1070),
    "stl": _row((57.15, 0.07), None, 610),
}

# table:resnet, NonIID-50 with ResNet-18, F = 1, R = 20
RESNET_18: Numbers = {
    "apd": _row((92.44, 0.17), (0.02, 0.00), 1860),
    "fedprox+apd": _row((92.89, 0.22), (0.02, 0.01), 2050),
    "fedweit": _row((94.86, 0.13), (0.00, 0.00), 1840),
}

# the appendix's table of Overlapped-CIFAR-100 with 20 tasks, 5 clients
TASKS_20: Numbers = {
    "fedprox": _row((29.76, 0.39), None, 61, 1220, 1220),
    "fedprox+ewc": _row((27.80, 0.58), None, 61, 1220, 1220),
    "fedprox+apd": _row((43.80, 0.76), None, 93, 1220, 1220),
    "fedweit": _row((46.78, 0.14), None, 92, 370, 1070),
}

# table:ablation, NonIID-50; it has no deviations
ABLATION: Numbers = {
    "fedweit": _row((84.11, None), None, 78, 370, 1070),
    "without-b_comm": _row((77.88, None), None, 70, 10, 10),
    "without-a_comm": _row((79.21, None), None, 79, 370, 1040),
    "without-a": _row((65.66, None), None, 61, 370, 1040),
    "without-m": _row((78.71, None), None, 87, 1230, 1250),
}

# table:ablation_reg, NonIID-50
REGULARIZERS: Numbers = {
    "fedweit": {**_row((84.43, 0.50), None, 68.93), "backward_transfer": (-0.0014, None)},
    "without-l1": {**_row((87.12, 0.24), None, 354.41), "backward_transfer": (-0.0007, None)},
    "without-l2": {**_row((56.76, 0.84), None, 63.44), "backward_transfer": (-0.3203, None)},
}

# the table in sup:fig:n_rounds, Overlapped-CIFAR-100, 5 clients: rounds x epochs in a round
EPOCHS: Numbers = {
    "20x1": _row((55.16, 0.19), None, 75, 370, 1070),
    "10x2": _row((55.18, 0.08), None, 77, 190, 530),
    "4x5": _row((53.73, 0.44), None, 83, 80, 220),
    "1x20": _row((53.22, 0.14), None, 88, 20, 70),
}
