"""Connectors by name: two classes each, imported when they are made."""

import importlib
from collections.abc import Iterable
from typing import Any, ClassVar

from .base import KVConnectorBase, KVConnectorSchedulerBase


class KVConnectorFactory:
    _registry: ClassVar[dict[str, dict[str, str]]] = {}
    _aliases: ClassVar[dict[str, str]] = {}
    _requires_pd_staging: ClassVar[dict[str, bool]] = {}

    @classmethod
    def register(
        cls,
        name: str,
        *,
        worker_module: str,
        worker_class: str,
        scheduler_module: str,
        scheduler_class: str,
        aliases: Iterable[str] = (),
        requires_pd_staging: bool = True,
    ) -> None:
        names = {
            "worker_module": worker_module,
            "worker_class": worker_class,
            "scheduler_module": scheduler_module,
            "scheduler_class": scheduler_class,
        }
        cls._registry[name] = names
        cls._requires_pd_staging[name] = requires_pd_staging
        cls._aliases[name.casefold()] = name
        for alias in aliases:
            if cls._aliases.setdefault(alias.strip().casefold(), name) != name:
                raise ValueError(f"{alias!r} is the name of another connector")

    @classmethod
    def canonical_name(cls, value: object, *, path: str = "kv_transfer_config") -> str:
        name = cls._aliases.get(value.strip().casefold()) if isinstance(value, str) else None
        if name is None:
            raise ValueError(f"{path} names no connector: {value!r}; known are {sorted(cls._registry)}")
        return name

    @classmethod
    def topology_uses_pd_staging(
        cls, kv_transfer_config: dict[str, Any] | None, *, path: str = "kv_transfer_config"
    ) -> bool:
        if not kv_transfer_config:
            return False
        return cls._requires_pd_staging[cls.canonical_name(kv_transfer_config.get("kv_connector"), path=path)]

    @classmethod
    def create_connector(cls, config: Any, role: str = "worker") -> KVConnectorBase | KVConnectorSchedulerBase:
        names = cls._registry[cls.canonical_name(config.kv_transfer_config.get("kv_connector"))]
        if role not in ("worker", "scheduler"):
            raise ValueError(f"a connector has the roles worker and scheduler, not {role!r}")
        module = importlib.import_module(names[f"{role}_module"])
        return getattr(module, names[f"{role}_class"])(config)
