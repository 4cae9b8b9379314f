"""The console: a web page for operators with all runs under some folders, requests with approval, and a JSON API.

`tokens` defines who may do what, `runs` holds the operations, `pages` and `json_api` are its two interfaces, and
`app` combines them behind `security`. `sifu serve` starts the console.
"""

__version__ = "0.2.0"
