variable "name" {
  type        = string
  description = "Prefix of all names."
}

variable "home_region" {
  type        = string
  description = "Region of the buckets."
}

data "aws_caller_identity" "this" {}

data "aws_iam_policy_document" "key" {
  # The account's own policies decide who may use the key; without this statement nobody could change it again.
  statement {
    sid       = "AccountDecides"
    actions   = ["kms:*"]
    resources = ["*"]
    principals {
      type        = "AWS"
      identifiers = ["arn:aws:iam::${data.aws_caller_identity.this.account_id}:root"]
    }
  }
}

resource "aws_kms_key" "store" {
  region                  = var.home_region
  description             = "${var.name}: store, database and agent secret"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  policy                  = data.aws_iam_policy_document.key.json
}

resource "aws_s3_bucket" "store" {
  region        = var.home_region
  bucket_prefix = "${var.name}-store-"
}

resource "aws_s3_bucket_versioning" "store" {
  region = var.home_region
  bucket = aws_s3_bucket.store.id
  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "store" {
  region = var.home_region
  bucket = aws_s3_bucket.store.id
  rule {
    bucket_key_enabled = true
    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.store.arn
    }
  }
}

resource "aws_s3_bucket_public_access_block" "store" {
  region                  = var.home_region
  bucket                  = aws_s3_bucket.store.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_logging" "store" {
  region        = var.home_region
  bucket        = aws_s3_bucket.store.id
  target_bucket = aws_s3_bucket.logs.id
  target_prefix = "store/"
}

# Coral's own retention (`coral library gc`) decides what is deleted; this ends what it deleted for good, and leftovers.
resource "aws_s3_bucket_lifecycle_configuration" "store" {
  region = var.home_region
  bucket = aws_s3_bucket.store.id
  rule {
    id     = "old-versions"
    status = "Enabled"
    filter {}
    noncurrent_version_expiration {
      noncurrent_days = 30
    }
    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }
}

data "aws_iam_policy_document" "tls_only" {
  statement {
    sid       = "OnlyOverTls"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.store.arn, "${aws_s3_bucket.store.arn}/*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "store" {
  region = var.home_region
  bucket = aws_s3_bucket.store.id
  policy = data.aws_iam_policy_document.tls_only.json
}

# Access logs of the store and the gateway.
resource "aws_s3_bucket" "logs" {
  region        = var.home_region
  bucket_prefix = "${var.name}-logs-"
}

resource "aws_s3_bucket_versioning" "logs" {
  region = var.home_region
  bucket = aws_s3_bucket.logs.id
  versioning_configuration {
    status = "Enabled"
  }
}

# Load balancers write access logs only where the bucket's key is S3's own.
resource "aws_s3_bucket_server_side_encryption_configuration" "logs" {
  region = var.home_region
  bucket = aws_s3_bucket.logs.id
  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

resource "aws_s3_bucket_public_access_block" "logs" {
  region                  = var.home_region
  bucket                  = aws_s3_bucket.logs.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_lifecycle_configuration" "logs" {
  region = var.home_region
  bucket = aws_s3_bucket.logs.id
  rule {
    id     = "a-year"
    status = "Enabled"
    filter {}
    expiration {
      days = 365
    }
    noncurrent_version_expiration {
      noncurrent_days = 30
    }
    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }
}

data "aws_iam_policy_document" "logs" {
  statement {
    sid       = "AccessLogs"
    actions   = ["s3:PutObject"]
    resources = ["${aws_s3_bucket.logs.arn}/*"]
    principals {
      type        = "Service"
      identifiers = ["logging.s3.amazonaws.com", "logdelivery.elasticloadbalancing.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.this.account_id]
    }
  }
}

resource "aws_s3_bucket_policy" "logs" {
  region = var.home_region
  bucket = aws_s3_bucket.logs.id
  policy = data.aws_iam_policy_document.logs.json
}

# The fleet's CURVE keys (`coral keys`); filled in by hand once, so that they are in no state file.
resource "aws_secretsmanager_secret" "agent" {
  region      = var.home_region
  name_prefix = "${var.name}-agent-keys-"
  description = "Keys with which node agents prove themselves to the coordinator."
  kms_key_id  = aws_kms_key.store.arn
}

output "bucket" {
  value = aws_s3_bucket.store.id
}

output "bucket_arn" {
  value = aws_s3_bucket.store.arn
}

output "log_bucket" {
  value = aws_s3_bucket_policy.logs.bucket
}

output "key_arn" {
  value = aws_kms_key.store.arn
}

output "agent_secret_arn" {
  value = aws_secretsmanager_secret.agent.arn
}
