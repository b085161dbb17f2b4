"""The engine's YAML file (`engine.yaml`): on what the engines compute, and how they serve each variant of each model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coral_core.config.fields import Strict
from coral_core.config.yaml_lines import read_yaml_model
from coral_core.domain.launch import Device, EngineTerms, ModelTerms, Runtime

Count = Annotated[int, Field(ge=1, strict=True)]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00\s][^\x00]*$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")]


class ModelTermsSpec(Strict):
    """How one variant of a model is served. What is not given follows from the variant and from what capacities assume."""

    path: Text = Field(description="folder on the node, or a name that the node can download")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None
    quantization: Annotated[str, Field(pattern=r"^[a-z0-9_-]+$")] | None = None
    max_model_len_tokens: Count | None = Field(default=None, description="default: of the model's own what has room")
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    block_size_tokens: Count | None = None
    kv_cache_memory_bytes: Count | None = Field(default=None, description="per worker; required on a CPU")
    start_limit_s: Count = Field(default=900, description="an engine that is not ready by then has failed")
    extra_args: tuple[Text, ...] = ()
    env: dict[VariableName, str] = Field(default={})

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        requests, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if requests is not None and tokens is not None and tokens < requests:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        return self


class EngineSpec(Strict):
    """Terms of all engines. Paths that begin with `./` or `../` are relative to the file's folder."""

    device: Literal["cpu", "cuda"]
    runtimes: tuple[Runtime, ...] = Field(default=(Runtime.VLLM,), min_length=1)
    key_file: Text | None = Field(default=None, description="the fleet's key on every node; required for runtime coral")
    step_timeout_s: Count = 10
    eager: bool | None = Field(default=None, description="no graph compilation; default: on CPUs only")
    models: dict[str, dict[str, ModelTermsSpec]] = Field(min_length=1, description="by model, then by variant")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if Runtime.CORAL in self.runtimes and self.key_file is None:
            raise ValueError("runtime coral needs key_file, the fleet's key on every node")
        for model, variants in self.models.items():
            if not variants:
                raise ValueError(f"{model} has no variant")
            for variant, terms in variants.items():
                if self.device == "cpu" and terms.kv_cache_memory_bytes is None:
                    raise ValueError(f"{model}.{variant} needs kv_cache_memory_bytes on a CPU")
        return self


def load_engine_file(path: Path) -> EngineTerms:
    """The engine's file; InputError names file and line of the first fault."""
    return engine_terms(read_yaml_model(path, EngineSpec), path.resolve().parent)


def engine_terms(spec: EngineSpec, folder: Path) -> EngineTerms:
    """The terms that `spec` states, its relative paths read from `folder`."""
    return EngineTerms(
        device=Device(spec.device),
        runtimes=spec.runtimes,
        key_file=None if spec.key_file is None else _placed(spec.key_file, folder),
        step_timeout_s=spec.step_timeout_s,
        eager=spec.eager,
        models={
            (model, variant): _model_terms(terms, folder)
            for model, variants in spec.models.items()
            for variant, terms in variants.items()
        },
    )


def _model_terms(spec: ModelTermsSpec, folder: Path) -> ModelTerms:
    return ModelTerms(**{**spec.model_dump(), "path": _placed(spec.path, folder)})


def _placed(path: str, folder: Path) -> str:
    return str((folder / path).resolve()) if path.startswith(("./", "../")) else path
