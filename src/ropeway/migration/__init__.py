"""Configurations of other engines, translated."""
