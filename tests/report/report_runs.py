"""Names and specs that the tests of the report share."""

HOSTILE = "<script>alert(1)</script>"
MATHS = r"$\frac{1}{0}$ & \"quotes\" 'single' 患者"
SMALL = {
    "data": {"clients": 8, "samples_per_client": 10},
    "local": {"rate": 0.2},
    "stop": {"target": 0.0, "max_rounds": 6},
}
