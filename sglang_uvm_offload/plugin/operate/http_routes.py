"""``GET /expert_offload`` and ``POST /expert_offload`` on SGLang's HTTP server, with SGLang's own rules for API keys."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_serving
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sglang_uvm_offload.config import Settings
from sglang_uvm_offload.plugin.operate.actions import Action, choices, refusal, too_few_tokens
from sglang_uvm_offload.plugin.operate.all_ranks import Unanswered, deliver, saved, status_of
from sglang_uvm_offload.plugin.server_config import config_of
from sglang_uvm_offload.residency.status import OffloadStatus

PATH = "/expert_offload"
SERVER = "sglang.srt.entrypoints.http_server"
WORKERS_APP = "sglang_uvm_offload.plugin.operate.http_app:app"
WRAPPED = "SGLANG_UVM_OFFLOAD_WRAPPED_APP"
"""The environment variable that names the app to which ``WORKERS_APP`` adds the routes."""
MAX_BODY_BYTES = 4096


class _Command(msgspec.Struct, forbid_unknown_fields=True):
    action: Action


class Refused(Exception):
    """A request that gets an error response."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


def add_where_served() -> None:
    """Call this in a launcher that offloads, before it serves. Does nothing without an HTTP server (``sglang.Engine``)."""
    server = sys.modules.get(SERVER)
    if server is None:
        return
    if get_serving().tokenizer_worker_num == 1:
        add(server.app)
    elif (served := envs.SGLANG_HTTP_SERVER_APP_PATH.get()) != WORKERS_APP:
        # Separate processes import the app by its name. It may be the user's own.
        os.environ.update({WRAPPED: served, envs.SGLANG_HTTP_SERVER_APP_PATH.name: WORKERS_APP})


def add(app: Any) -> None:
    """Add the routes to SGLang's FastAPI app, once."""
    if all(getattr(route, "path", None) != PATH for route in app.routes):
        app.add_api_route(PATH, get_status, methods=["GET"], summary="Where experts are, and how they are used")
        app.add_api_route(PATH, post_action, methods=["POST"], summary="Act on experts: readvise, pause, resume or save")


async def get_status(request: Request) -> Response:
    """The status; 404 if experts are not offloaded; 503 if no rank answers, one could not make its status, or no
    temporary folder can be written to."""
    try:
        manager, _ = _served()
        return _answer(200, await status_of(manager))
    except (Refused, Unanswered) as refused:
        return _refusing(refused)


@auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]  # SGLang's
async def post_action(request: Request) -> Response:
    """Perform ``{"action": ...}`` on all ranks and return the status after it: 400 for a malformed request, 409 for an action
    that this server does not support or has too few tokens for, 500 if a save failed."""
    try:
        action = action_in(await _body(request))
        manager, config = _served()
        if reason := refusal(action, config):
            raise Refused(409, f"{action}: {reason}")
        before = await status_of(manager) if action is Action.READVISE else None
        if before is not None and (reason := too_few_tokens(before.ranks)):
            raise Refused(409, f"{action}: {reason}")
        await deliver(manager, action.message())
        status = await (saved(manager) if action is Action.SAVE else status_of(manager))
        if before is not None:
            status = msgspec.structs.replace(status, note=choices(before.ranks, status.ranks))
        if action is Action.SAVE:
            _raise_failures(status)
        return _answer(200, status)
    except (Refused, Unanswered) as refused:
        return _refusing(refused)


def _served() -> tuple[Any, Settings]:
    """The tokenizer manager of this process, and the config of the launch. Raises ``Refused`` if experts are not offloaded."""
    manager = sys.modules[SERVER].get_global_state().tokenizer_manager
    config = config_of(manager.server_args)
    if config is None:
        raise Refused(404, "this server does not offload experts: it needs --expert-offload-num-resident")
    return manager, config


def _raise_failures(status: OffloadStatus) -> None:
    """Raise ``Refused`` if a save failed."""
    failed = {f"{save.what}: {save.error}" for rank in status.ranks for save in rank.saves if save.error is not None}
    if failed:
        raise Refused(500, f"{Action.SAVE}: {'; '.join(sorted(failed))}")


async def _body(request: Request) -> bytes:
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise Refused(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect as left:  # nobody reads the answer, and the server would log a traceback
        raise Refused(400, "the connection closed before the body was complete") from left
    return body


def action_in(body: bytes) -> Action:
    """The action that the body of a request names. Raises ``Refused``."""
    try:
        return msgspec.json.decode(body, type=_Command).action
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        actions = " or ".join(f'{{"action": "{action}"}}' for action in Action)
        raise Refused(400, f"the body must be {actions}: {error}") from error


def _refusing(refused: Refused | Unanswered) -> Response:
    return _answer(refused.status if isinstance(refused, Refused) else 503, {"error": str(refused)})


def _answer(status: int, body: Any) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
