"""Every setting's default, bounds and way across processes.

Knows neither argv nor the environment; those are test_cli.py's.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve import config as config_module
from embedserve.config import Config, available_cores
from embedserve.errors import StartError
from embedserve.process import ChildSpec

BOUNDED = [item for item in fields(Config) if item.metadata["least"] is not None]
CHOSEN = [item for item in fields(Config) if item.metadata["choices"]]


def flag_of(item: Field[Any]) -> str:
    return "--" + item.name.replace("_", "-")


def name_of(item: Field[Any]) -> str:
    return item.name


def test_defaults_are_those_that_are_documented() -> None:
    config = Config()
    assert (config.host, config.http_port, config.grpc_port) == ("127.0.0.1", 8080, 50051)
    assert (config.device, config.dtype, config.token_ids, config.log_format) == ("auto", "auto", "refuse", "text")
    assert (config.max_inputs, config.max_body_mb, config.request_timeout_s) == (2048, 32, 60)
    assert (config.model, config.revision, config.frontends, config.max_batch_tokens) == (None, None, None, None)
    assert (config.auto_truncate, config.served_model_name) == (False, ())


def test_config_is_frozen() -> None:
    config = Config()
    for item in fields(Config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, item.name, getattr(config, item.name))


@pytest.mark.parametrize("item", fields(Config), ids=name_of)
def test_every_setting_says_what_it_is(item: Field[Any]) -> None:
    assert item.metadata["help"]
    assert "\n" not in item.metadata["help"]


def assert_refused(says: list[str], **values: object) -> None:
    with pytest.raises(StartError) as raised:
        Config(**values)
    assert "\n" not in raised.value.message
    for text in says:
        assert text in raised.value.message


@pytest.mark.parametrize("item", BOUNDED, ids=name_of)
def test_value_below_the_least_is_refused_with_what_is_allowed(item: Field[Any]) -> None:
    least = item.metadata["least"]
    for value in (least - 1, least - 0.0001, -1, -(10**9)):
        if value < least:
            assert_refused([flag_of(item), str(value), f"at least {least}"], **{item.name: value})


@pytest.mark.parametrize("item", BOUNDED, ids=name_of)
def test_least_value_is_allowed(item: Field[Any]) -> None:
    least = item.metadata["least"]
    assert getattr(Config(**{item.name: least}), item.name) == least


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("item", [item for item in BOUNDED if "float" in item.type], ids=name_of)
def test_what_is_no_finite_number_is_refused(item: Field[Any], value: float) -> None:
    """JSON has neither, so no child could be told."""
    assert_refused([flag_of(item), str(value)], **{item.name: value})


@pytest.mark.parametrize("item", CHOSEN, ids=name_of)
def test_each_choice_is_allowed_and_no_other(item: Field[Any]) -> None:
    for choice in item.metadata["choices"]:
        assert getattr(Config(**{item.name: choice}), item.name) == choice
    for value in ("", "other", item.metadata["choices"][0].upper()):
        assert_refused([flag_of(item), repr(value), ", ".join(item.metadata["choices"])], **{item.name: value})


@pytest.mark.parametrize("name", ["http_port", "grpc_port"])
def test_port_beyond_the_last_is_refused(name: str) -> None:
    assert getattr(Config(**{name: 65535}), name) == 65535
    assert_refused(["65536", "65535"], **{name: 65536})


def test_both_ports_may_be_free_ones_but_not_the_same_one() -> None:
    assert Config(http_port=0, grpc_port=0).http_port == 0
    assert_refused(["--http-port", "--grpc-port", "9000", "differ"], http_port=9000, grpc_port=9000)
    assert_refused(["50051"], http_port=50051)


# What follows from the settings


def test_auto_limits_give_way_to_those_that_are_set() -> None:
    auto = Config()
    assert (auto.batch_tokens_limit, auto.batch_ms_limit, auto.queued_tokens_limit) == (
        config_module.AUTO_MAX_BATCH_TOKENS,
        config_module.AUTO_MAX_BATCH_MS,
        config_module.AUTO_MAX_QUEUED_TOKENS,
    )
    config = Config(max_batch_tokens=5, max_batch_ms=6.5, max_queued_tokens=7)
    assert (config.batch_tokens_limit, config.batch_ms_limit, config.queued_tokens_limit) == (5, 6.5, 7)


@pytest.mark.parametrize(("megabytes", "nbytes"), [(32, 32_000_000), (0.5, 500_000), (0.001, 1000)])
def test_body_is_limited_in_millions_of_bytes(megabytes: float, nbytes: int) -> None:
    assert Config(max_body_mb=megabytes).max_body_bytes == nbytes


@pytest.mark.parametrize(("cores", "frontends"), [(1, 1), (2, 1), (4, 1), (7, 1), (8, 2), (16, 4), (64, 4)])
def test_auto_is_a_frontend_per_four_cores_and_four_at_most(
    cores: int, frontends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "available_cores", lambda: cores)
    assert Config().frontend_count == frontends
    assert Config(frontends=9).frontend_count == 9


@pytest.mark.parametrize(("tokens", "frontends", "share"), [(100, 1, 100), (100, 3, 33), (2, 3, 1)])
def test_each_frontend_has_an_even_share_of_the_queue(tokens: int, frontends: int, share: int) -> None:
    assert Config(max_queued_tokens=tokens, frontends=frontends).queued_tokens_share == share


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        (None, 8),
        ("max 100000", 8),
        ("1600000 100000", 8),
        ("300000 100000", 3),
        ("350000 100000", 3),
        ("50000 100000", 1),
        ("", 8),
    ],
)
def test_available_cores_are_those_of_the_affinity_mask_within_the_quota(
    quota: str | None, cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu_max = tmp_path / "cpu.max"
    if quota is not None:
        cpu_max.write_text(quota + "\n")
    monkeypatch.setattr(config_module, "Path", lambda path: cpu_max)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert available_cores() == cores


# Across processes

counts = st.integers(1, 2**53)
durations = st.floats(1, 1e9)
configs = st.builds(
    Config,
    model=st.none() | st.text(max_size=30),
    revision=st.none() | st.text(max_size=10),
    host=st.sampled_from(["127.0.0.1", "::", "localhost"]),
    http_port=st.integers(0, 30_000),
    grpc_port=st.integers(30_001, 65_535),
    frontends=st.none() | st.integers(1, 64),
    served_model_name=st.lists(st.text(max_size=10), max_size=3).map(tuple),
    max_batch_tokens=st.none() | counts,
    max_batch_ms=st.none() | durations,
    max_queued_tokens=st.none() | counts,
    max_inputs=counts,
    max_body_mb=durations,
    auto_truncate=st.booleans(),
    **{item.name: st.sampled_from(item.metadata["choices"]) for item in CHOSEN},
)


def child_spec(config: Config) -> ChildSpec:
    return ChildSpec(
        name="frontend.0.1",
        number=0,
        config=config,
        run_dir="/run/embedserve",
        parent_pid=1,
        control_fd=3,
        host="127.0.0.1",
        http_port=8080,
        grpc_port=50051,
    )


@given(config=configs)
def test_config_is_the_same_in_a_child(config: Config) -> None:
    spec = child_spec(config)
    told = msgspec.json.decode(msgspec.json.encode(spec), type=ChildSpec)
    assert told == spec
    assert told.config == config
    assert isinstance(told.config, Config)
    assert isinstance(told.config.served_model_name, tuple)


def test_child_checks_what_it_is_told() -> None:
    told = msgspec.json.decode(msgspec.json.encode(child_spec(Config())))
    told["config"]["max_inputs"] = 0
    with pytest.raises(StartError, match="--max-inputs is 0"):
        msgspec.json.decode(msgspec.json.encode(told), type=ChildSpec)
