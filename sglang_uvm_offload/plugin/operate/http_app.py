"""The app of each HTTP process of a server with several tokenizer workers: SGLang's, with this plugin's routes.

SGLang imports it by the name in ``SGLANG_HTTP_SERVER_APP_PATH``, in a process in which it loads no plugins.
"""

from __future__ import annotations

import os
import pkgutil

from sglang.srt.plugins import load_plugins

from sglang_uvm_offload.plugin.operate import http_routes

load_plugins()  # without the plugin, this process refuses the arguments of a server that offloads
app = pkgutil.resolve_name(os.environ[http_routes.WRAPPED])
http_routes.add(app)
