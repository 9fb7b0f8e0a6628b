# SGLang's image with this plugin: docker build --tag sglang-uvm-offload .
# .dockerignore lets in only what the wheel is built from. The plugin's dependencies are SGLang's own, so pip installs none.
# Building the wheel downloads setuptools, into an environment that pip removes again, so the build needs a package index.
FROM lmsysorg/sglang:v0.5.23
RUN --mount=type=bind,target=/src,rw pip install --no-cache-dir --no-deps /src
