"""Profiles: their file, and who finds and refuses them."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aspire_llm.config import make_config
from aspire_llm.context import profile as profile_module
from aspire_llm.context.profile import Profile, find_profile, kept_profile, read_profile, shipped_profiles
from aspire_llm.context.selectors import RefreshedSelector
from aspire_llm.engine.build import Built, build_engine
from aspire_llm.errors import UserError
from aspire_llm.models.load import LoadedModel
from tiny import GREEDY, plain_tokens, prompts_of, requests_for, run, tiny_model

LAYERS = 4


pytestmark = pytest.mark.usefixtures("data_home")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(num_layers=LAYERS, windows=(None,) * LAYERS)


def written(path: Path, model: LoadedModel, **changes: Any) -> Path:
    fields = {"refresh_layers": (0, 3), "budget": 24, "verified_share": 0.25, "measured": {}}
    profile = Profile(model="tiny", fingerprint=model.fingerprint, **{**fields, **changes})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(profile.model_dump(mode="json")))
    return path


def engine_of(model: LoadedModel, **options: Any) -> Built:
    config = make_config(model="tiny", max_model_len=128, max_num_seqs=2, block_size=4, calibrate=False, **options)
    return build_engine(config, model)


def drafting(built: Built) -> tuple[Sequence[int], int, int]:
    """Refresh layers, budget, and positions from the last verification."""
    selector = built.engine.runner.selector
    assert isinstance(selector, RefreshedSelector)
    return selector.refresh_layers, built.engine.runner.contexts.budget, selector.num_verified


# ---- who uses which profile


def test_without_a_profile_the_penultimate_layer_refreshes(model: LoadedModel) -> None:
    assert drafting(engine_of(model)) == ((2,), 512, 256)


def test_a_named_profile_is_used(model: LoadedModel, tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", model)
    assert drafting(engine_of(model, profile=str(path))) == ((0, 3), 24, 6)


def test_a_kept_profile_is_found_and_none_turns_it_off(model: LoadedModel, data_home: Path) -> None:
    path = written(kept_profile(model.fingerprint), model)
    assert path == data_home / "aspire-llm" / "profiles" / "tiny-0.profile.json"
    assert drafting(engine_of(model)) == ((0, 3), 24, 6)
    assert drafting(engine_of(model, profile="none")) == ((2,), 512, 256)
    assert drafting(engine_of(tiny_model(1, num_layers=LAYERS, windows=(None,) * LAYERS))) == ((2,), 512, 256)


def test_a_shipped_profile_is_found_by_fingerprint_and_a_kept_one_wins(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = [written(tmp_path / "other.json", tiny_model(1)), written(tmp_path / "a.json", model, budget=40)]
    monkeypatch.setattr(profile_module, "shipped_profiles", lambda: shipped)
    found = find_profile(None, model.fingerprint)
    assert found is not None
    assert found.budget == 40
    written(kept_profile(model.fingerprint), model, budget=48)
    found = find_profile(None, model.fingerprint)
    assert found is not None
    assert found.budget == 48
    assert find_profile(None, "unknown") is None


def test_options_win_over_the_profile(model: LoadedModel, tmp_path: Path) -> None:
    path = str(written(tmp_path / "p.json", model))
    assert drafting(engine_of(model, profile=path, refresh_layers=(1,))) == ((1,), 24, 6)
    assert drafting(engine_of(model, profile=path, budget=16)) == ((0, 3), 16, 4)


def test_the_budget_is_that_of_other_contexts_too(model: LoadedModel, tmp_path: Path) -> None:
    path = str(written(tmp_path / "p.json", model))
    assert engine_of(model, profile=path, method="vegas").engine.runner.contexts.budget == 24


def test_output_is_that_of_plain_decoding(model: LoadedModel, tmp_path: Path) -> None:
    path = str(written(tmp_path / "p.json", model, budget=16))
    prompts = prompts_of([50, 70])
    requests = requests_for(model, prompts, GREEDY)
    engine = engine_of(model, profile=path, policy="staggered", draft_tokens=4).engine
    assert run(engine, requests) == plain_tokens(model, prompts, GREEDY)
    assert sum(request.stats.num_draft_tokens for request in requests) > 0


# ---- refusals


def test_another_models_profile_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", tiny_model(7))
    with pytest.raises(UserError, match=r"p\.json.*another model.*tiny-7.*tiny-0") as caught:
        engine_of(model, profile=str(path))
    assert caught.value.parameter == "profile"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"version": "1"}, "version '1'"),
        ({"format": "something"}, "not a profile"),
        ({"refresh_layers": []}, "refresh_layers"),
        ({"refresh_layers": [-1]}, "refresh_layers"),
        ({"refresh_layers": "2"}, "refresh_layers"),
        ({"budget": 0}, "budget"),
        ({"verified_share": 1.5}, "verified_share"),
        ({"fingerprint": ""}, "fingerprint"),
        ({"surprise": 1}, "surprise"),
        ({"measured": None}, "measured"),
    ],
)
def test_damaged_profiles_are_refused(change: dict[str, Any], words: str, model: LoadedModel, tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", model)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=words) as caught:
        engine_of(model, profile=str(path))
    assert "p.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", list(Profile.model_fields))
def test_incomplete_profiles_are_refused(field: str, model: LoadedModel, tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", model)
    value = json.loads(path.read_text())
    del value[field]
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match=r"p\.json.*" + field):
        read_profile(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_what_is_no_profile_is_refused(content: bytes, model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"p\.json"):
        engine_of(model, profile=str(path))
    kept = kept_profile(model.fingerprint)
    kept.parent.mkdir(parents=True)
    kept.write_bytes(content)
    with pytest.raises(UserError, match=r"tiny-0\.profile\.json"):  # not passed over in silence
        engine_of(model)


def test_a_missing_file_and_a_layer_that_is_not_there_are_refused(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no-such-file"):
        engine_of(model, profile="no-such-file")
    with pytest.raises(UserError, match="refresh layer 9"):
        engine_of(model, profile=str(written(tmp_path / "p.json", model, refresh_layers=(9,))))


def test_reading_a_profile_needs_no_torch() -> None:
    names = [
        alias.name
        for node in ast.walk(ast.parse(Path(profile_module.__file__).read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    assert "torch" not in names


def test_shipped_profiles_can_be_read() -> None:
    assert [read_profile(path).model for path in shipped_profiles()] == ["smollm2-135m"]


@pytest.mark.model
def test_the_shipped_profile_is_that_of_the_built_in_model() -> None:
    from aspire_llm.models.load import load_model

    loaded = load_model("smollm2-135m", dtype=torch.bfloat16, device="cpu")
    assert find_profile(None, loaded.fingerprint) == read_profile(shipped_profiles()[0])
