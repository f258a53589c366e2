# CPU:  docker build -t search-r1 .
# CUDA: docker build -t search-r1:cuda --build-arg BUILD="--cuda 13" .     (12 for drivers before 580)
# The image has gcc and Python.h, which vLLM's kernels need; the wheels bring CUDA themselves.
FROM python:3.11-bookworm
ARG BUILD=--cpu
ENV PATH=/opt/venv/bin:$PATH PYTHON=/opt/venv/bin/python PYTHONUNBUFFERED=1 \
    HF_HOME=/data/huggingface NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /app
COPY . .
# BUILD is a flag and its value.
# hadolint ignore=SC2086
RUN python scripts/install.py /opt/venv ${BUILD} && rm -rf /root/.cache \
    && useradd --uid 1000 --create-home trainer && install -d -o trainer /data /app/runs /app/models \
    && chown trainer /app /app/example
USER 1000
VOLUME /data
EXPOSE 8000
CMD ["bash", "retrieval_launch.sh"]
