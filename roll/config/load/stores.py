"""Run folders and models in stores: what an address in the configuration stands for, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll.config.schema.pipelines import Config
from roll.errors import ConfigError, Fault
from roll.stores.address import address_fault, is_address, local_folder, missing_package
from roll.stores.models import described_model
from roll.stores.store import StoreError


def settle_stores(values: dict[str, Any]) -> None:
    """Split an `output_dir` in a store into `output_store` and the local folder, in place.

    Raises:
        ConfigError: the address is malformed, has credentials, or `output_store` is set, too.
    """
    faults = [fault for place, address in addresses(values) if (fault := address_fault(place, address)) is not None]
    if faults:  # alone, because no other message may repeat credentials
        raise ConfigError(*faults)
    address = values.get("output_dir")
    if not is_address(address):
        return
    if values.get("output_store") is not None:
        problem = f"'{values['output_store']}', but output_dir is an address, too"
        remedy = "remove one of them, or set output_dir to the local folder"
        raise ConfigError(Fault("output_store", problem, remedy, "exclusive"))
    values |= {"output_store": address, "output_dir": str(local_folder(address))}


def addresses(node: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the key path and the value of each key of the configuration that may have an address, and has one."""
    for key, value in node.items() if isinstance(node, dict) else ():
        where = f"{place}.{key}" if place else str(key)
        may = key == "model_name_or_path" or not place and key in ("output_dir", "output_store", "pretrain")
        if may and is_address(value):
            yield where, value
        yield from addresses(value, where)


def output_fault(config: Config) -> Fault | None:
    """Return the fault of an `output_store` that is no address."""
    if config.output_store is None or is_address(config.output_store):
        return None
    problem = f"'{config.output_store}' is no address of a store"
    return Fault("output_store", problem, "use s3://bucket/prefix, gs://bucket/prefix or file:///folder", "malformed")


def package_faults(config: Config) -> list[Fault]:
    """Return a fault for each key with a store whose package is not installed."""
    found = [missing_package(place, address) for place, address in addresses(config.model_dump(mode="json"))]
    return [fault for fault in found if fault is not None]


def description_fault(place: str, model: str) -> Fault | None:
    """Fetch what a plan reads of a model in a store: everything but its weights. Return the fault, or None."""
    if missing_package(place, model) is not None:
        return None  # a fault of its own
    try:
        described_model(model)
    except StoreError as error:
        return error.fault(place)
    return None
