"""Batches in OpenAI's file format: thousands of requests from a file of lines, each answered exactly once.

lines     one line, read and checked            validate  a whole file, without holding it
plan      the index of a file on disk           prefix    which lines begin alike
lanes     what is fed next, to how many workers  ledger    finished lines on disk: the truth
pool      the calls to the pool                 lease     who runs a batch, and its counts
runner    the loop                              job       a batch from its files to its results
shelf     the folder that gateways share        service   the runners inside a gateway
"""
