"""Transports that send weights from ranks to engines' workers without files."""
