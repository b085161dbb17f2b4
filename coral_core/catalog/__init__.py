"""Facts: GPUs, node configurations, prices, models. Small dated tables under `data/` and their strict loaders."""

from coral_core.catalog.hardware import catalog_names, load_catalog, load_gpus
from coral_core.catalog.hf_config import model_from_hf_config, read_hf_config
from coral_core.catalog.lookup import find_config, find_gpu, find_model
from coral_core.catalog.user_models import load_models, save_user_model

__all__ = [
    "catalog_names",
    "find_config",
    "find_gpu",
    "find_model",
    "load_catalog",
    "load_gpus",
    "load_models",
    "model_from_hf_config",
    "read_hf_config",
    "save_user_model",
]
