"""Pieces that adapters of models share."""
