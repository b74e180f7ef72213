# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-omni-health project
"""What a request asks of the stages is checked for all of them, before any gets it."""

from types import SimpleNamespace

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm_omni.engine.health import admission
from vllm_omni.errors import OmniClientError
from vllm_omni.health.runtime import HealthRuntime, set_current

from vllm_omni_health.settings.model import HealthSettings

VOCABULARY = 100


def config():
    """As much of a stage's as vLLM's checks look at."""
    model = SimpleNamespace(
        max_logprobs=20,
        get_vocab_size=lambda: VOCABULARY,
        is_diffusion=False,
        logits_processors=None,
    )
    return SimpleNamespace(
        model_config=model,
        speculative_config=None,
        structured_outputs_config=None,
    )


class Engine:
    """Two stages; what upstream builds of a request is its id."""

    def __init__(self, default=None):
        self.stage_vllm_configs = [config(), config()]
        self.default_sampling_params_list = [SamplingParams(), default or SamplingParams()]
        self.output_processors = [SimpleNamespace(tokenizer=None)] * 2


@pytest.fixture
def runtime():
    runtime = HealthRuntime(HealthSettings())
    set_current(runtime)
    yield runtime
    set_current(None)


@pytest.fixture
def build(runtime, monkeypatch):
    monkeypatch.setattr(admission.seams, "original", lambda _target: lambda _self, id, *_: id)

    def build(*params, engine=None):
        return admission.build_add_request_message(
            engine or Engine(), "mine", "a prompt", None, list(params) or None
        )

    return build


def unchecked(**fields):
    """Parameters as a client's JSON can make them: vLLM looks at few of the types."""
    params = SamplingParams()
    for name, value in fields.items():
        setattr(params, name, value)
    return params


UNFIT = {
    "more logprobs than there are": unchecked(logprobs=10**6),
    "more of the prompt's": unchecked(prompt_logprobs=10**6),
    "a token out of the vocabulary": unchecked(allowed_token_ids=[VOCABULARY]),
    "a bias for one": unchecked(logit_bias={10**6: 1.0}),
    "a stop token that is none": unchecked(stop_token_ids=[-1, 10**18]),
    "a number too large to send": unchecked(seed=10**30),
    "half a character": unchecked(stop=["\ud800"]),
    "a string for a number": unchecked(max_tokens="many"),
    "no list": unchecked(bad_words=5),
    "an array without end": unchecked(
        structured_outputs=StructuredOutputsParams(json={"type": "array", "maxItems": 10**12})
    ),
    "the same as text": unchecked(
        structured_outputs=StructuredOutputsParams(json='{"a": [{"minItems": 1e12}]}')
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_later_stages_parameters_are_checked_as_the_first_ones_are(build, runtime, what):
    with pytest.raises((VLLMValidationError, OmniClientError)) as raised:
        build(SamplingParams(), UNFIT[what])
    assert admission.refusal_of(raised.value).status == 400
    assert runtime.refusals.of("mine").message


def test_sound_parameters_and_the_deployments_own_pass(build, runtime):
    assert build() == "mine"
    assert build(SamplingParams(), SamplingParams(logprobs=20, stop_token_ids=[5])) == "mine"
    assert build(SamplingParams(), object()) == "mine"
    schema = {"type": "array", "maxItems": 10}
    structured = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    assert build(SamplingParams(), structured) == "mine"
    assert runtime.refusals.of("mine") is None


def test_a_stage_whose_own_defaults_do_not_pass_is_not_vllms_to_check(build):
    """Its vocabulary is not the text model's, say."""
    engine = Engine(default=unchecked(stop_token_ids=[2150]))
    assert build(SamplingParams(), SamplingParams(stop_token_ids=[2150]), engine=engine) == "mine"


def test_what_upstream_raises_is_the_clients_error(runtime, monkeypatch):
    def raising(*_):
        raise TypeError("no such prompt")

    monkeypatch.setattr(admission.seams, "original", lambda _target: raising)
    with pytest.raises(OmniClientError, match="no such prompt"):
        admission.build_add_request_message(Engine(), "mine", 5)
    assert runtime.refusals.of("mine").message == "no such prompt"


def test_what_is_nobodys_value_is_not_the_clients(runtime, monkeypatch):
    def raising(*_):
        raise RuntimeError("a dead engine")

    monkeypatch.setattr(admission.seams, "original", lambda _target: raising)
    with pytest.raises(RuntimeError, match="a dead engine"):
        admission.build_add_request_message(Engine(), "mine", "a prompt")
    assert runtime.refusals.of("mine") is None
