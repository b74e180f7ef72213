# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""Deploy files and overrides: what is wrong with them is said with file, line and key."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_omni
from vllm.plugins import load_general_plugins
from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, resolve_pipeline_config
from vllm_omni.config.resolver import resolve_omni_config
from vllm_omni.config.stage_config import PipelineConfig, resolve_deploy_yaml
from vllm_omni.entrypoints.health.server import deploy_file, deployment
from vllm_omni.entrypoints.health.server.arguments import BadInput

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "build" / "cpu-models" / "ar"
GOOD = (ROOT / "examples" / "cpu" / "deploy" / "ar-2.yaml").read_text()
SHIPPED = sorted((Path(vllm_omni.__file__).parent / "deploy").rglob("*.yaml"))
OURS = sorted((ROOT / "examples" / "cpu" / "deploy").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _tiny_pipelines() -> None:
    load_general_plugins()


def told(path: Path | None, overrides: Any = None, model: str = str(MODEL)) -> str | None:
    """What a start with these is refused with; None where it goes on."""
    name = None if path is None else str(path)
    args = SimpleNamespace(deploy_config=name, stage_overrides=overrides, model=model)
    try:
        deployment.check_model(args)
        deployment.check(args)
        resolve_omni_config(
            model,
            cli_overrides={},
            trust_remote_code=None,
            deploy_config_path=name,
            stage_overrides=overrides,
            strategy_config_path=None,
        )
    except BadInput as exc:
        return str(exc)
    except Exception as exc:
        return deployment.explain(exc, args)
    return None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("async_chunk:", "async_chnk:", "line 3: async_chnk: no such key; did you mean"),
        ("async_chunk: false", "async_chunk: maybe", "line 3: async_chunk='maybe': "),
        ("max_num_seqs: 64", "max_num_sqs: 64", "line 10: stage 0: max_num_sqs: no such key; did"),
        ("max_num_seqs: 64", "max_num_seqs: many", 'line 10: stage 0: max_num_seqs="many": must'),
        ("max_num_seqs: 64", "max_num_seqs: -3", "greater than or equal to 1"),
        ("max_model_len: 4096", "max_model_len: [1]", "line 9: stage 0: max_model_len=[1]: must"),
        ("enforce_eager: true", "enforce_eager: 7", "line 13: stage 0: enforce_eager=7: must be"),
        ("max_tokens: 64", "max_tokns: 64", "line 17: stage 0: default_sampling_params.max_tokns"),
        (
            "stage_id: 1",
            "stage_id: 0",
            "line 18: stages: stage_id=0 is that of the stage in",
        ),
        ("stage_id: 1", "stage_id: 7", "line 18: stage 7: no such stage; tiny_ar_2 has 0, 1"),
        ("stage_id: 1", "stage_id: one", "line 18: stages: stage_id='one': must be a whole number"),
        ("stage_id: 1", "stage_name: a", "line 18: stages: a stage without stage_id"),
        ("tiny_ar_2", "tiny_ar_99", "tiny_ar_99"),
        ("dtype:", "pipeline: a\ndtype:", "line 4: pipeline: is there already, in line 2"),
        ('    devices: "0"', '\tdevices: "0"', "line 8, column 1: not YAML: "),
        ("stages:", "stages: 5\nplatforms:", "line 6: stages: must be a list of stages"),
        (
            "enforce_eager: true",
            "enable_fault_tolerance: true",
            "line 13: stage 0: enable_fault_tolerance: vLLM then holds faults back",
        ),
    ],
)
def test_what_is_wrong_in_a_deploy_file(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "deploy.yaml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    line = told(path)
    assert line is not None
    assert line.startswith(f"--deploy-config {path}: ")
    assert says in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ": is empty"),
        (b"# nothing\n", ": is empty"),
        (b"- a\n- b\n", "line 1: the file must be a mapping, not ['a', 'b']"),
        (b"hello", "line 1: the file must be a mapping, not 'hello'"),
        (b"stages: [a]", "stages: each entry must be a mapping, not 'a'"),
        (b"platforms: 5", "platforms: must be a mapping, not 5"),
        (b"base_config: no.yaml", "base_config: no such file: "),
        (b"base_config: deploy.yaml", "base_config: names the file itself"),
        (b"dtype: ${no.such}", "no.such"),
        (GOOD.encode("utf-16"), "utf-8"),
        (b"\x00\x01", "not YAML"),
    ],
)
def test_what_is_no_deploy_file(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_bytes(content)
    line = told(path)
    assert line is not None
    assert line.startswith(f"--deploy-config {path}: ")
    assert says in line
    assert "\n" not in line


def test_a_folder_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "Is a directory" in (told(tmp_path) or "")
    assert "no such file (also not in" in (told(tmp_path / "none.yaml") or "")


def test_what_upstream_takes_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    # An editor's byte-order mark, and another line ending.
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert told(path) is None
    assert told(path, {"1": {"max_num_seqs": 3}, "0": {"enforce_eager": False}}) is None


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"0": {"max_num_sqs": 1}}, "stage 0: max_num_sqs: no such key; did you mean"),
        ({"1": {"max_num_seqs": "many"}}, 'stage 1: max_num_seqs="many": must be'),
        ({"7": {"max_num_seqs": 1}}, "stage 7: no such stage; tiny_ar_2 has 0, 1"),
        ({"0": {"enable_fault_tolerance": True}}, "stage 0: enable_fault_tolerance: vLLM"),
        (
            {"0": {"default_sampling_params": {"n_": 1}}},
            "stage 0: default_sampling_params.n_: no such key",
        ),
    ],
)
def test_what_is_wrong_in_stage_overrides(tmp_path: Path, overrides: Any, says: str) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text(GOOD)
    line = told(path, overrides)
    assert line is not None
    assert line.startswith(f"--stage-overrides: {says}")


@pytest.mark.parametrize("path", SHIPPED + OURS, ids=lambda path: path.stem)
def test_every_file_that_is_shipped_passes(path: Path) -> None:
    entries = deploy_file.check(path)
    pipeline = _pipeline(path)
    if pipeline is not None:
        deployment.check_stages(entries, pipeline)


def _pipeline(path: Path) -> PipelineConfig | None:
    name = resolve_deploy_yaml(path).get("pipeline")
    if name is not None:
        return resolve_pipeline_config(name, None)
    found = (p for p in OMNI_PIPELINES.values() if isinstance(p, PipelineConfig))
    return next((p for p in found if p.default_deploy_config_name == path.name), None)


def test_most_of_them_were_compared_with_their_pipelines() -> None:
    known = [path for path in SHIPPED if _pipeline(path) is not None]
    assert len(known) > len(SHIPPED) / 2


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "a/b/c", "~/model"])
def test_a_model_that_is_not_there(model: str) -> None:
    with pytest.raises(BadInput, match="no such file or folder"):
        deployment.check_model(SimpleNamespace(model_tag=model, model=None))


@pytest.mark.parametrize("model", [str(MODEL), "Qwen/Qwen2.5-Omni-7B", "gpt2", "s3://b/m"])
def test_a_model_that_may_be_there(model: str) -> None:
    deployment.check_model(SimpleNamespace(model_tag=model, model=None))


def test_what_has_nothing_to_do_with_it_is_not_explained() -> None:
    args = SimpleNamespace(deploy_config=None, stage_overrides=None)
    assert deployment.explain(RuntimeError("max_num_seqs"), args) is None
    assert deployment.explain(ValueError("something else"), args) is None
