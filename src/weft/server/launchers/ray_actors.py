"""The two actors. In a module of their own, so that Ray's workers import them by name."""

from __future__ import annotations

import os

from weft.server.wire.endpoint import Endpoint


class ServerActor:
    """A server; its rows go over a socket of its own."""

    def __init__(self, coordinator: tuple[str, int], token: str, index: int, is_local: bool) -> None:
        from weft.server.server_process import start_server

        self._server = start_server(Endpoint(*coordinator), token=token, index=index, host=_host(is_local))

    def pid(self) -> int:
        return os.getpid()


class WorkerActor:
    def __init__(self, coordinator: tuple[str, int], token: str, name: str) -> None:
        self._coordinator, self._token, self._name = Endpoint(*coordinator), token, name

    def pid(self) -> int:
        return os.getpid()

    def run(self) -> None:
        import torch

        from weft.server.worker import run_worker

        torch.set_num_threads(1)  # workers are the parallelism
        run_worker(self._coordinator, token=self._token, name=self._name)


def _host(is_local: bool) -> str:
    if is_local:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())
