# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""A deployment that upstream refuses, or would serve otherwise than it says, in one line.

Upstream resolves model, deploy file and overrides before it starts a stage, and checks names and
types against its own configuration classes. What it refuses is put into words here: which file
or option, which line, which key. What it passes over in silence is refused.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from pydantic import ValidationError
from vllm.sampling_params import SamplingParams
from vllm_omni.config.config_factory import StageConfigFactory
from vllm_omni.config.stage_config import StageDeployConfig, StageExecutionType
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.engine.arg_utils import OmniEngineArgs
from vllm_omni.entrypoints.health.server import deploy_file
from vllm_omni.entrypoints.health.server.arguments import BadInput
from vllm_omni.entrypoints.health.server.deploy_file import Entry
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from vllm_omni_health.text import one_line

_FAULT_TOLERANCE = "enable_fault_tolerance"


def check_model(args: Any) -> None:
    """Raises BadInput for a path that does not exist and that no hub can know either."""
    model = getattr(args, "model_tag", None) or getattr(args, "model", None)
    if not isinstance(model, str) or "://" in model or os.path.exists(model):
        return
    try:
        validate_repo_id(model)
    except HFValidationError:
        raise BadInput(
            f"model {model}: no such file or folder, and not the name of a model on a hub, which "
            "is NAME or OWNER/NAME"
        ) from None


def check(args: Any) -> None:
    """Raises BadInput for the first thing in deploy file and overrides that upstream would not
    tell, or not as well."""
    given = entries(args)
    for entry in given:
        if entry.key == _FAULT_TOLERANCE and entry.value:
            raise BadInput(
                f"{entry.place} {_FAULT_TOLERANCE}: vLLM then holds faults back for a recovery of "
                "its own, so they would not reach the health layer; take it out, or use "
                "VLLM_OMNI_HEALTH=off to run without the layer"
            )

    aligner = getattr(args, "forced_aligner", None) or getattr(args, "forced_aligner_config", None)
    pipeline = _pipeline(args)
    # The forced aligner is a stage that is in no pipeline.
    if pipeline is not None and not aligner:
        check_stages(given, pipeline)


def _pipeline(args: Any) -> Any:
    """What upstream will serve; None where it is no pipeline, or where upstream fails to tell,
    which it does again, and then says why."""
    try:
        return StageConfigFactory.get_pipeline_config(
            model=getattr(args, "model_tag", None) or getattr(args, "model", None),
            trust_remote_code=bool(getattr(args, "trust_remote_code", False)),
            deploy_config_path=getattr(args, "deploy_config", None),
        )
    except Exception:
        return None


def entries(args: Any) -> tuple[Entry, ...]:
    """Every key that the command line and the deploy file give a stage, the winning ones first.

    Raises BadInput for a deploy file that cannot be read.
    """
    overrides = tuple(_overrides(getattr(args, "stage_overrides", None)))
    name = getattr(args, "deploy_config", None)
    if name is None:
        return overrides
    path = deploy_file.find(name)
    if path is None:
        raise BadInput(
            f"--deploy-config {name}: no such file (also not in {deploy_file._DEPLOY_DIR})"
        )
    return overrides + deploy_file.check(path)


def _overrides(overrides: Any) -> Iterable[Entry]:
    if not isinstance(overrides, Mapping):
        return
    for stage_id, stage in overrides.items():
        for key, value in stage.items() if isinstance(stage, Mapping) else ():
            place = f"--stage-overrides: stage {stage_id}:"
            yield Entry(place, int(stage_id) if stage_id.isdigit() else stage_id, key, value)


def check_stages(given: Iterable[Entry], pipeline: Any) -> None:
    """Raises BadInput for a stage that the pipeline does not have, and for parameters of
    sampling that its stages do not know."""
    stages = {stage.stage_id: stage for stage in pipeline.stages}
    for entry in given:
        stage = stages.get(entry.stage_id)
        if stage is None:
            known = ", ".join(str(stage_id) for stage_id in sorted(stages))
            raise BadInput(
                f"{entry.place} no such stage; {pipeline.model_type} has {known}",
            )
        if entry.key == "default_sampling_params" and isinstance(entry.value, Mapping):
            _check_sampling(entry, stage.execution_type is StageExecutionType.DIFFUSION)


def _check_sampling(entry: Entry, diffusion: bool) -> None:
    kind: Any = OmniDiffusionSamplingParams if diffusion else SamplingParams
    names = {field.name for field in fields(kind)} if diffusion else set(kind.__struct_fields__)
    for name in entry.value:
        if name not in names:
            raise BadInput(f"{entry.place} {entry.key}.{name}: no such key{_meant(name, names)}")


def explain(exc: BaseException, args: Any) -> str | None:
    """In one line, why upstream has refused this deployment; None where it cannot be told.

    For what its configuration classes and resolver raise, before any stage is started.
    """
    if not isinstance(exc, (ValueError, TypeError, KeyError)):
        return None
    try:
        given = entries(args)
    except BadInput as exc_:
        return str(exc_)
    if isinstance(exc, ValidationError):
        return _explain_validation(exc, given)
    text = one_line(str(exc.args[0]) if isinstance(exc, KeyError) and exc.args else str(exc))
    names = _names()
    words = set(re.findall(r"\w+", text))
    for entry in given:
        if entry.key not in names and entry.key in words:
            return f"{entry.place} {entry.key}: no such key{_meant(entry.key, names)}"
    for entry in given:
        if entry.key in words:
            return f"{entry.place} {entry.key}={_shown(entry.value)}: {text}"
    name = getattr(args, "deploy_config", None)
    return f"--deploy-config {name}: {text}" if name is not None else None


def _explain_validation(exc: ValidationError, given: Iterable[Entry]) -> str | None:
    error = exc.errors()[0]
    key = next((str(part) for part in reversed(error["loc"]) if isinstance(part, str)), "")
    for entry in given:
        if entry.key == key and entry.value == error["input"]:
            shown = _shown(entry.value)
            what = error["msg"].lower().removeprefix("input should be ")
            return f"{entry.place} {key}={shown}: must be {what}"
    return None


def _names() -> set[str]:
    """What upstream has a field for, in any kind of stage."""
    kinds: tuple[Any, ...] = (StageDeployConfig, OmniEngineArgs, OmniDiffusionConfig)
    return {field.name for kind in kinds for field in fields(kind)}


def _meant(key: str, known: set[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return (
        f"; did you mean {close[0]}?"
        if close
        else "; known are the engine arguments that `vllm serve --omni --help=all` lists"
    )


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return one_line(text if len(text) <= 80 else text[:77] + "...")
