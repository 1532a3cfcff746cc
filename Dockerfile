# tracefit as an image: `docker build -t tracefit .`, then
# `docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/data" tracefit run runs/ --out out/`: as you, who may write to your folder.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY requirements.lock /tmp/requirements.lock
COPY --from=build /wheels /wheels
# Versions are those of the lock file; what only the tests need is not installed.
RUN sed -n 's/^\([A-Za-z0-9._-]*==[^ ;]*\).*/\1/p' /tmp/requirements.lock > /tmp/versions \
    && pip install --no-cache-dir --constraint /tmp/versions "$(ls /wheels/*.whl)[receive,report]" \
    && rm -r /wheels /tmp/requirements.lock /tmp/versions \
    && useradd --create-home --uid 10001 tracefit \
    && install --directory --owner=tracefit /data
USER 10001
WORKDIR /data
ENV PYTHONUNBUFFERED=1
EXPOSE 4317 4318
STOPSIGNAL SIGTERM
ENTRYPOINT ["tracefit"]
CMD ["--help"]
