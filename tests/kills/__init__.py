"""Runs that are killed, starved of room and begun again: see campaign.py."""
