"""moto's S3 on 127.0.0.1:PORT with an empty bucket "kernels" and a user who may use it; moto checks every request's signature against the
user's key from then on. Writes the key to KEYS_FILE before it listens.

    s3_server.py PORT KEYS_FILE
"""

import json
import os
import sys
import threading

port, keys_file = int(sys.argv[1]), sys.argv[2]
os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
os.environ.update(AWS_ACCESS_KEY_ID="setup", AWS_SECRET_ACCESS_KEY="setup", NO_PROXY="*")

import boto3  # noqa: E402
from moto.core import set_initial_no_auth_action_count  # noqa: E402
from moto.server import DomainDispatcherApplication, create_backend_app  # noqa: E402
from werkzeug.serving import make_server  # noqa: E402

server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
endpoint = f"http://127.0.0.1:{server.server_port}"
policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
iam = boto3.client("iam", endpoint_url=endpoint, region_name="us-east-1")
iam.create_user(UserName="flce")
iam.put_user_policy(UserName="flce", PolicyName="s3", PolicyDocument=json.dumps(policy))
key = iam.create_access_key(UserName="flce")["AccessKey"]
boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="kernels")
with open(keys_file, "w") as file:
    json.dump({"access_key": key["AccessKeyId"], "secret_key": key["SecretAccessKey"]}, file)


@set_initial_no_auth_action_count(0)
def serve() -> None:
    make_server("127.0.0.1", port, DomainDispatcherApplication(create_backend_app), threaded=True).serve_forever()


serve()
