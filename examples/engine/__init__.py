"""Supervised fine-tuning and PPO over flce.engine, in ReaLHF's names: what engine_sft.py, engine_ppo.py and engine_demo.py are made of."""
