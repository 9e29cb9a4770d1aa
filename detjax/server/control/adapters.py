"""Adapters that come and go while a server runs."""

from collections.abc import Collection
from pathlib import Path

from detjax.engine import Engine
from detjax.engine.commands import Commanded, LoadAdapter, UnloadAdapter
from detjax.server.control.uploads import WeightFiles
from detjax.server.http.errors import ApiError, quote
from detjax.server.replicated_engine import ReplicatedEngine


class AdapterFiles:
    """Loads adapters from the server's directory of weights, and from uploads."""

    def __init__(
        self, engine: Engine | ReplicatedEngine, commands: Commanded, files: WeightFiles, models: Collection[str]
    ) -> None:
        """Adapters of an engine, next to the names of its model. Several engines keep the adapters of their start."""
        self._engine, self._commands, self._files, self._models = engine, commands, files, models

    async def load(self, name: str, path: str, *, replaces: bool) -> None:
        """Loads the adapter in a folder below the server's directory of weights.

        Raises:
            ApiError: the name is taken, the folder is elsewhere or not one, or there are several engines.
            ValueError: the adapter does not fit.
        """
        self._refuse_replicas()
        if not name or name in self._models:
            raise ApiError(
                400,
                f"lora_name is {quote(name)}; accepted: a name that the model itself does not have",
                param="lora_name",
            )
        if name in self._engine.adapters and not replaces:
            raise ApiError(
                400,
                f"lora_name is {quote(name)}, which is loaded already; accepted: another name, or load_inplace",
                param="lora_name",
            )
        folder = self._files.below(path)
        if not folder.is_dir():
            raise ApiError(400, f"lora_path is {quote(path)}; accepted: the folder of an adapter", param="lora_path")
        await self._commands.command(LoadAdapter(name, folder, replaces))

    async def replace(self, name: str, file: Path) -> None:
        """Gives a loaded adapter other tensors. Requests in flight keep theirs.

        Raises:
            ApiError: no adapter has the name, or there are several engines.
            ValueError: the tensors do not fit.
        """
        self._refuse_replicas()
        self._check(name, "adapter")
        await self._commands.command(LoadAdapter(name, file, replaces=True))

    async def unload(self, name: str) -> None:
        """Unloads an adapter, and returns when its last request has ended.

        Raises:
            ApiError: no adapter has the name, or there are several engines.
        """
        self._refuse_replicas()
        self._check(name, "lora_name")
        await self._commands.command(UnloadAdapter(name))

    def _refuse_replicas(self) -> None:
        # An engine that starts again would need all adapters that came and went.
        if isinstance(self._engine, ReplicatedEngine):
            raise ApiError(
                400,
                "the server has several engines, whose adapters do not change; accepted: --lora-modules at the start, "
                "or one engine",
            )

    def _check(self, name: str, param: str) -> None:
        if name not in self._engine.adapters:
            accepted = ", ".join(map(repr, self._engine.adapters)) or "none, as no adapter is loaded"
            raise ApiError(404, f"{param} is {quote(name)}; accepted: {accepted}", param=param, code="model_not_found")
