"""An HTML page with an article, navigation and a footer, for the tests that read pages."""

SENTENCES = [
    f"The river Danube passes its place number {i} on the long way to the sea, says the book."
    for i in range(12)
]
ARTICLE = (
    "<html><head><title>Danube</title><script>var tracker = 'spy';</script></head><body>"
    "<nav><a href='/'>Home page</a><a href='/login'>Log in</a></nav><article><h1>Danube</h1>"
    + "".join(f"<p>{sentence}</p>" for sentence in SENTENCES)
    + "</article><footer>Cookie settings</footer></body></html>"
)
