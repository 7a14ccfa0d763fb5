"""Puts this folder on the import path (``toys``) and keeps tests on one thread and off the network."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

torch.set_num_threads(1)
