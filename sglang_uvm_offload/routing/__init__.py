"""What the router picked: counted, kept between runs, recorded."""
