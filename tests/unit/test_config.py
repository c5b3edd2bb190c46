"""Settings from the environment: defaults, each variable, and refusals that name it."""

from dataclasses import fields
from pathlib import Path

import pytest

from kvedit.config import Config
from kvedit.errors import BadRequest


def test_an_empty_environment_gives_the_declared_defaults():
    assert Config.from_env({}) == Config()


def test_every_variable_reaches_its_setting():
    config = Config.from_env(
        {
            "KVEDIT_PIN_FRACTION": "0.25",
            "KVEDIT_COMPILE_WAIT": "2.5",
            "KVEDIT_OPEN": "1",
            "KVEDIT_CLIENT_SKILLS": "1",
            "KVEDIT_TRUST": "names",
            "KVEDIT_ALLOW": "a, b,,",
            "KVEDIT_BOUNDARY_TOKENS": "7",
            "KVEDIT_SEAM": "3",
            "KVEDIT_MIN_SPAN": "9",
            "KVEDIT_RETIRED_MAX": "5",
            "KVEDIT_CLIENT_MAX_SKILLS": "6",
            "KVEDIT_CLIENT_MAX_TOKENS": "7",
            "KVEDIT_CLIENT_RATE": "8",
            "KVEDIT_RING_SIZE": "11",
            "KVEDIT_EXACT": "1",
            "KVEDIT_TESTING": "1",
            "KVEDIT_REPORT": "off",
            "KVEDIT_HOME": "/somewhere",
        }
    )
    assert config == Config(
        pin_fraction=0.25,
        compile_wait_s=2.5,
        open=True,
        client_skills=True,
        trust="names",
        allow=frozenset({"a", "b"}),
        seam=3,
        min_span_tokens=9,
        boundary_tokens=7,
        retired_max=5,
        client_max_skills=6,
        client_max_tokens=7,
        client_rate_per_minute=8,
        ring_size=11,
        exact=True,
        reports=False,
        testing=True,
        home=Path("/somewhere"),
    )
    same = [f.name for f in fields(Config) if getattr(config, f.name) == getattr(Config(), f.name)]
    assert same == []  # a new setting needs its variable in the table above


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KVEDIT_PIN_FRACTION", "1.5"),
        ("KVEDIT_PIN_FRACTION", "nan"),
        ("KVEDIT_COMPILE_WAIT", "-1"),
        ("KVEDIT_SEAM", "many"),
        ("KVEDIT_REPORT", "maybe"),
        ("KVEDIT_SEAM", "-1"),
        ("KVEDIT_MIN_SPAN", "0"),
        ("KVEDIT_RING_SIZE", "0"),
        ("KVEDIT_TRUST", "everybody"),
        ("KVEDIT_OPEN", "yes"),
        ("KVEDIT_CLIENT_SKILLS", "2"),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_variable(name, text):
    with pytest.raises(BadRequest, match=f"kvedit: {name}: expected .* got '{text}'"):
        Config.from_env({name: text})


@pytest.mark.parametrize("name", ["KVEDIT_SEAM", "KVEDIT_RING_SIZE", "KVEDIT_OPEN", "KVEDIT_TRUST"])
def test_an_empty_value_is_an_unset_one(name):
    assert Config.from_env({name: ""}) == Config()
