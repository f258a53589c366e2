"""From published or own question sets to the rows that training and validation read.

The scripts of `scripts/data_process/` are thin command lines over this. Nothing here trains.
"""
