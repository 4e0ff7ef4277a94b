"""As much of ATOM as a connector is written against, for machines without ATOM: put this folder on sys.path.

The names, fields and signatures are ATOM's (`../test_double.py` compares them); their behaviour is written again here.
"""
