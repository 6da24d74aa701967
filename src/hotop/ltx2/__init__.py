"""`python -m hotop ltx2`: LTX-2's transformer end to end, its two hot ops registered each way."""
