"""The vocabulary of context parallelism: what each spelling of cp_mode means, and which source wins."""

from __future__ import annotations

import pytest

import cula
from cula.ops.kda.cp_mode import CPMode

SPELLINGS = [
    (False, CPMode.OFF),
    ("off", CPMode.OFF),
    ("auto", CPMode.AUTO),
    (True, CPMode.FORCE),
    ("force", CPMode.FORCE),
    *[(mode, mode) for mode in CPMode],
]


@pytest.mark.parametrize("value, expected", SPELLINGS, ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_an_argument_means_itself(value, expected: CPMode, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CPMode.parse(value, grad=grad) is expected
    monkeypatch.setenv("CULA_CP", "force")
    assert CPMode.parse(value, grad=grad) is expected


def test_none_is_the_environment_then_auto_without_grad_and_off_with(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CPMode.parse(None, grad=False) is CPMode.AUTO
    assert CPMode.parse(None, grad=True) is CPMode.OFF
    for text, mode in (("off", CPMode.OFF), ("auto", CPMode.AUTO), ("force", CPMode.FORCE)):
        monkeypatch.setenv("CULA_CP", text)
        assert CPMode.parse(None, grad=False) is CPMode.parse(None, grad=True) is mode


@pytest.mark.parametrize("value", ["on", "FORCE", "", 1.5, (1,)], ids=str)
def test_anything_else_is_a_range_error(value) -> None:
    with pytest.raises(cula.RangeError, match="cp_mode"):
        CPMode.parse(value)


def test_an_unknown_environment_value_is_a_range_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP", "yes")
    with pytest.raises(cula.RangeError, match=r"CULA_CP.*off, auto, force"):
        CPMode.parse(None)
