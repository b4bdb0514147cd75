"""FedAvg with the plain LeNet on Flower's simulation: `weft bench --peers` compares weft's FedAvg with it.

    python flower_fedavg.py DATA.npz ROUNDS BATCH RATE CORES

It runs in a separate environment (`make peers`), without weft, and finally prints one line of JSON. The data has for
each client c the arrays train_images_c and test_images_c, uint8 (count, 3, 32, 32), their labels, and mean_c and
deviation_c by channel. The whole network is averaged, with its head: all clients have the same task.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)  # for the processes that Flower starts

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from plain_lenet import PlainLeNet, PlainTrainer

START = time.time()


def trainer_of(data: Mapping[str, np.ndarray], client: int, net: PlainLeNet, rate: float) -> PlainTrainer:
    return PlainTrainer(net, tuple(data[f"mean_{client}"].tolist()), tuple(data[f"deviation_{client}"].tolist()), rate)


def tensors_of(data: Mapping[str, np.ndarray], client: int, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(data[f"{part}_images_{client}"]), torch.from_numpy(data[f"{part}_labels_{client}"])


def make_client(file: str, batch: int, rate: float) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)  # Flower runs as many clients at a time as there are cores
        client = int(context.node_config["partition-id"])
        data = np.load(file)  # reads only the arrays that are used
        net = PlainLeNet()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        trainer = trainer_of(data, client, net, rate)
        images, labels = tensors_of(data, client, "train")
        drawn = torch.Generator().manual_seed(1000 * client + int(message.content["config"]["server-round"]))
        for chosen in torch.randperm(len(labels), generator=drawn).split(batch):
            trainer.step(images[chosen], labels[chosen])
        metrics = MetricRecord({"num-examples": len(labels)})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def make_server(file: str, rounds: int, rate: float, result: dict[str, object]) -> ServerApp:
    app = ServerApp()
    data = dict(np.load(file))
    clients = sum(name.startswith("mean_") for name in data)
    ends: list[float] = []

    def evaluate(round_index: int, arrays: ArrayRecord) -> MetricRecord:
        ends.append(time.time())
        if round_index < rounds:
            return MetricRecord({})
        net = PlainLeNet()
        net.load_state_dict(arrays.to_torch_state_dict())
        accuracies = [
            trainer_of(data, client, net, rate).accuracy(*tensors_of(data, client, "test")) for client in range(clients)
        ]
        result["accuracy"] = sum(accuracies) / clients
        return MetricRecord({"accuracy": result["accuracy"]})

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
        )
        initial = ArrayRecord(PlainLeNet().state_dict())
        strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=evaluate)
        result["round_ends"] = ends

    return app


def main() -> None:
    file, rounds, batch, rate, cores = sys.argv[1], *map(float, sys.argv[2:])
    clients = sum(name.startswith("mean_") for name in np.load(file).files)
    result: dict[str, object] = {"began": START}
    server = make_server(file, int(rounds), rate, result)
    client = make_client(file, int(batch), rate)
    resources = {"init_args": {"num_cpus": int(cores)}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=clients, backend_config=resources)
    if "accuracy" not in result:
        sys.exit("Flower's simulation ended without a result; see its output above")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
