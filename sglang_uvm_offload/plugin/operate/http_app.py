"""The app of each HTTP process of a server with several tokenizer workers: SGLang's, with this plugin's routes.

SGLang imports it by its name, which ``SGLANG_HTTP_SERVER_APP_PATH`` gives, in a process for which it loads no plugins.
"""

from __future__ import annotations

import os
import pkgutil

from sglang.srt.plugins import load_plugins

from sglang_uvm_offload.plugin.operate import http_routes

load_plugins()  # the arguments of a server that offloads are refused where the plugin is not in place
app = pkgutil.resolve_name(os.environ[http_routes.WRAPPED])
http_routes.add(app)
