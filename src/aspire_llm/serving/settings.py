"""Options of the server, beside those of the engine."""

from __future__ import annotations

import difflib
import hmac
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from aspire_llm.config import EngineConfig, Size, read_text
from aspire_llm.errors import UserError, explain


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)]
Seconds = Annotated[float, Field(gt=0)]


class ServerSettings(BaseModel):
    """How the engine is offered over HTTP. Names as in vLLM where it has them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: every network")
    port: int = Field(8000, ge=0, le=65535, description="0: any free one")
    served_model_name: Texts = Field(
        (),
        description="name of the model in requests and answers; may be repeated, the first is shown; default: the model's",
    )
    api_key: Annotated[tuple[SecretStr, ...], BeforeValidator(_as_tuple)] = Field(
        (),
        description="key that requests must bring (Authorization: Bearer KEY); may be repeated; default: none needed",
    )
    api_key_file: str | None = Field(None, description="file with one such key a line, which keeps them out of `ps`")
    cors_allow_origins: Texts = Field(
        (), description="web origins whose pages may call this server; * for all; may be repeated"
    )
    max_body_size: Size = Field(16 * 2**20, description="largest request body in bytes, e.g. 16M")
    max_prompt_tokens: Size | None = Field(None, description="longest prompt; default: what max_model_len allows")
    max_queue: int = Field(
        1024, ge=0, description="requests that may wait for a place in the batch; more are answered 429"
    )
    request_timeout: Seconds | None = Field(
        None, description="seconds after which a request is given up; default: never"
    )
    read_timeout: Seconds = Field(30.0, description="seconds that a client may take to send a request")
    write_timeout: Seconds = Field(60.0, description="seconds that a client may leave an answer unread")
    shutdown_grace: float = Field(30.0, ge=0, description="seconds that running requests get after SIGTERM")
    chat_template: str | None = Field(None, description="file with a chat template instead of the model's")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "none"] = Field(
        "auto",
        description="how the model writes tool calls: hermes (Qwen too), llama3_json, none; auto: by its chat template",
    )
    live_page: bool = Field(True, description="the page at / that shows what the engine does")
    root_path: str = Field("", description="path under which a proxy offers this server")
    ssl_certfile: str | None = Field(None, description="certificate for HTTPS")
    ssl_keyfile: str | None = Field(None, description="its private key")
    otlp_traces_endpoint: str | None = Field(
        None, description="URL of an OpenTelemetry collector that gets a span for each request (OTLP over HTTP)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe messages to show")
    log_format: Literal["text", "json"] = Field("text", description="json: one object a line")


def make_settings(**options: Any) -> ServerSettings:
    """Raises UserError naming the option, its value and what is allowed."""
    try:
        return ServerSettings(**options)
    except ValidationError as error:
        raise explain(error, ServerSettings) from None


class ApiKeys:
    """The keys that open the server."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises UserError for a key file that cannot be read, or a key that no header can carry."""
        keys = [key.get_secret_value() for key in settings.api_key]
        if settings.api_key_file is not None:
            lines = read_text(settings.api_key_file, "api_key_file").splitlines()
            keys += [line.strip() for line in lines if line.strip()]
            if not keys:
                raise UserError(f"api_key_file {settings.api_key_file!r} has no key in it", "api_key_file")
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise UserError("api_key: a key must be printable ASCII without blanks, and not empty", "api_key")
        self._keys = [key.encode() for key in keys]

    @property
    def needed(self) -> bool:
        return bool(self._keys)

    def opens(self, authorization: bytes) -> bool:
        """Whether the value of an Authorization header has one of the keys. Takes as long for any wrong key."""
        scheme, _, key = authorization.partition(b" ")
        right = False
        for known in self._keys:
            right |= hmac.compare_digest(key.strip(), known)
        return right and scheme.lower() == b"bearer"


def split_options(options: Mapping[str, Any], source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine's and server's options of a configuration file. `max-model-len` is `max_model_len`. UserError for others."""
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name in EngineConfig.model_fields:
            engine[name] = value
        elif name in ServerSettings.model_fields:
            server[name] = value
        else:
            known = [*EngineConfig.model_fields, *ServerSettings.model_fields]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"{source}: unknown option {str(key)!r}{hint}", name)
    return engine, server


def read_config(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine's and server's options of a YAML file. Raises UserError."""
    try:
        import yaml
    except ImportError:
        raise UserError("--config needs PyYAML: pip install 'aspire-llm[serve]'", "config") from None
    text = read_text(path, "--config")
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: not YAML: {' '.join(str(error).split())}", "config") from None
    if loaded is None:
        return {}, {}
    if not isinstance(loaded, dict):
        raise UserError(f"--config {path}: must be names with values, such as `port: 8000`", "config")
    return split_options(loaded, f"--config {path}")
